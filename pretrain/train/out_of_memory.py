"""What held the memory when it ran out, and what to change: a snapshot in the run's directory and an error in words.

Takes the allocator's error -> `RUN/diagnosis/attempt-001-rank-00000-memory.json` (bytes of weights, gradients,
optimizer state and the rest, the largest tensors, the host's memory) and, on CUDA, `…-memory.pickle` for
pytorch.org/memory_viz. A process that the kernel kills leaves none of it: the agent says "likely out of memory" then.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import resource
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch

from pretrain.config.schema import RunConfig
from pretrain.engine.engine import Engine
from pretrain.errors import PretrainError, StoreError
from pretrain.model.flops import parameter_counts
from pretrain.train.build import Training

_LARGEST = 20
_MARKS = ("out of memory", "can't allocate memory", "not enough memory")


class OutOfMemoryError(PretrainError):
    """A rank ran out of memory; the message says what held it and what to change."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on the host or on a device."""
    known = isinstance(error, MemoryError | torch.cuda.OutOfMemoryError)
    return known or (isinstance(error, RuntimeError) and any(mark in str(error) for mark in _MARKS))


def explain(training: Training, error: BaseException) -> OutOfMemoryError:
    """Writes the snapshot and gives the error to raise; nothing here fails for want of memory or disk."""
    place, config = training.place, training.config
    snapshot: dict[str, Any] = {"rank": place.world.rank, "phase": place.heartbeat.phase_name, "error": str(error)}
    where = "and no snapshot could be written"
    with contextlib.suppress(MemoryError, StoreError, OSError, RuntimeError):
        snapshot |= {"step": place.heartbeat.step + 1, **take_snapshot(training.engine)}
        key = f"diagnosis/attempt-{place.attempt:03d}-rank-{place.world.rank:05d}-memory.json"
        place.run.store.put(key, json.dumps(snapshot, indent=1).encode())
        where = f"the snapshot is {place.run.store.url}/{key}"
        _write_cuda_snapshot(training, key.removesuffix(".json") + ".pickle")
    held = snapshot.get("bytes", {})
    parts = ", ".join(f"{name} {_size(size)}" for name, size in held.items() if size)
    return OutOfMemoryError(
        f"out of memory in step {snapshot.get('step', place.heartbeat.step + 1)}, phase {place.heartbeat.phase_name}: "
        f"{str(error).splitlines()[0]} Held: {parts or 'unknown'}; {where}. A rank must hold its share of the state "
        f"and the activations of one micro-batch. {' '.join(advice(config, held))}"
    )


def explain_start(config: RunConfig, device: torch.device, error: BaseException) -> OutOfMemoryError:
    """The error to raise where memory ran out before the first step; the model may be half built."""
    count = parameter_counts(config.model).total
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return OutOfMemoryError(
        f"out of memory while the model and its optimizer were built: {reason} The model has {count:,} parameters, "
        f"{_size(4 * count)} in fp32, which every rank holds whole before they are shared out; {_free_memory(device)}. "
        "Start fewer ranks on a node, or make the model smaller. pretrain plan CONFIG tells what fits."
    )


def _free_memory(device: torch.device) -> str:
    """What this process may still have, in words."""
    free = f"the host has {_size(psutil.virtual_memory().available)} free"
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        free += f", this process may have {_size(limit)} of address space (ulimit -v)"
    if device.type == "cuda":
        free += f", the device {_size(torch.cuda.mem_get_info(device)[0])}"
    return free


def take_snapshot(engine: Engine) -> dict[str, Any]:
    """Bytes by what they are for, and the largest tensors."""
    parameters = list(engine.module.parameters())
    kept = [tensor for fragment in engine.fragments() for tensor in fragment.tensors.values()]
    groups = {
        "weights": _distinct(parameters),
        "gradients": _distinct(p.grad for p in parameters if p.grad is not None),
        "masters and optimizer state": _distinct(kept),
    }
    known = {pointer for group in groups.values() for pointer in group}
    rest: dict[int, int] = {}
    largest = []
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor) and found.layout == torch.strided and not found.is_meta:
            storage = found.untyped_storage()
            largest.append((storage.nbytes(), list(found.shape), str(found.dtype), str(found.device)))
            if storage.data_ptr() not in known:
                rest[storage.data_ptr()] = storage.nbytes()
    sizes = {name: sum(group.values()) for name, group in groups.items()} | {"other tensors": sum(rest.values())}
    memory = psutil.virtual_memory()
    host = {"resident": psutil.Process().memory_info().rss, "available": memory.available, "total": memory.total}
    top = sorted(largest, key=lambda entry: -entry[0])[:_LARGEST]
    return {
        "bytes": sizes,
        "host_bytes": host,
        "largest": [dict(zip(("bytes", "shape", "dtype", "device"), entry, strict=True)) for entry in top],
    }


def advice(config: RunConfig, held: dict[str, int]) -> list[str]:
    """What to change, what helps most first. PURE."""
    state = held.get("weights", 0) + held.get("gradients", 0) + held.get("masters and optimizer state", 0)
    activations, sharding = [], []
    if not config.engine.activation_checkpointing:
        activations.append("Set engine.activation_checkpointing=true (a third more computing).")
    if config.batch.micro_batch_size > 1:
        half = math.ceil(config.batch.micro_batch_size / 2)
        activations.append(f"Set batch.micro_batch_size={half} (in a new run: it is part of the numerics).")
    if config.engine.zero_stage < 3:
        sharding.append(f"Set engine.zero_stage={config.engine.zero_stage + 1}, or train on more ranks.")
    if config.engine.offload_optimizer == "none" and config.cluster.device == "cuda":
        sharding.append("Set engine.offload_optimizer=cpu.")
    advised = [*sharding, *activations] if state > held.get("other tensors", 0) else [*activations, *sharding]
    return [*advised[:3], "pretrain plan CONFIG tells what fits."]


def _distinct(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes by storage: views of one count once."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def _write_cuda_snapshot(training: Training, key: str) -> None:
    if training.place.device.type != "cuda":
        return
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        path = Path(folder) / "snapshot.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
        training.place.run.store.put(key, path.read_bytes())


def _size(count: int) -> str:
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count} bytes"
