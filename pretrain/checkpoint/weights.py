"""A checkpoint's content without an engine: whole tensors by name, hashes, differences.

takes -> store, name; gives -> results that do not depend on the ranks or the ZeRO stage that saved it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pretrain.checkpoint.digests import num_threads
from pretrain.checkpoint.files import CheckpointFiles, only_in, read_manifest
from pretrain.checkpoint.format import Manifest
from pretrain.checkpoint.holds import reading
from pretrain.checkpoint.listing import list_checkpoints, verify_checkpoint
from pretrain.engine.state import BUFFER, MASTER
from pretrain.errors import CheckpointError
from pretrain.store import NotFoundError, Store


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor of two checkpoints.

    Attributes:
        max_abs: largest absolute difference; None when only one of them has it or the shapes differ.
    """

    parameter: str
    key: str
    equal: bool
    max_abs: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def newest_checkpoint(store: Store) -> str:
    """Name of the newest whole-looking checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    found = list_checkpoints(store)
    for info in found:
        if info.problem is None:
            return info.name
    reasons = "; ".join(f"{info.name}: {info.problem}" for info in found) or "the folder is empty"
    raise CheckpointError(f"no checkpoint in {store.url} ({reasons}). Train until checkpoint.every_steps have passed.")


def read_state(store: Store, name: str) -> dict[str, Any]:
    """The training state that a checkpoint was saved with, as JSON.

    Raises:
        NotFoundError: there is no such checkpoint.
        CheckpointError: its manifest is damaged.
    """
    return read_manifest(store, name).training_state


def read_weights(store: Store, name: str) -> dict[str, torch.Tensor]:
    """Whole fp32 master weights by name, verified.

    Raises:
        CheckpointError: the checkpoint is absent or damaged.
    """
    with open_verified(store, name, "read weights") as (manifest, files):
        return {
            name: _whole(files, manifest, name, MASTER) for name in manifest.parameters if _is_weight(manifest, name)
        }


class StoredWeights(Mapping[str, torch.Tensor]):
    """fp32 master weights by name, each read when it is asked for and kept by nobody; open while its context is.

    Attributes:
        shapes: of all of them, which costs no reading.
        name, save_id: of the checkpoint, and of the very save that made it.
    """

    def __init__(self, manifest: Manifest, files: CheckpointFiles) -> None:
        self._manifest, self._files = manifest, files
        self.name, self.save_id = manifest.name, manifest.save_id
        self.shapes = {name: shape for name, shape in manifest.parameters.items() if _is_weight(manifest, name)}

    def __getitem__(self, parameter: str) -> torch.Tensor:
        if parameter not in self.shapes:
            raise KeyError(parameter)
        return _whole(self._files, self._manifest, parameter, MASTER)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


@contextmanager
def open_weights(store: Store, name: str, purpose: str) -> Iterator[StoredWeights]:
    """The weights of a checkpoint, each checked as it is read; it is not deleted while they are open.

    Raises:
        CheckpointError: the checkpoint is absent or damaged, here or when a damaged weight is read.
    """
    with reading(store, name, purpose):
        try:
            manifest = read_manifest(store, name)
        except NotFoundError:
            raise CheckpointError(f"checkpoint={name} does not exist in {store.url}. Name one of the list.") from None
        yield StoredWeights(manifest, CheckpointFiles(only_in(store.child(name)), manifest, num_threads()))


def weights_sha256(store: Store, name: str) -> str:
    """Hash of the logical weights: names, shapes and fp32 values in sorted order, buffers left out. Verifies.

    Raises:
        CheckpointError: the checkpoint is absent or damaged.
    """
    digest = hashlib.sha256()
    with open_verified(store, name) as (manifest, files):
        for parameter in sorted(name for name in manifest.parameters if _is_weight(manifest, name)):
            digest.update(f"{parameter} {list(manifest.parameters[parameter])}\n".encode())
            digest.update(memoryview(_whole(files, manifest, parameter, MASTER).view(-1).numpy()).cast("B"))
    return digest.hexdigest()


def diff_checkpoints(store_a: Store, name_a: str, store_b: Store, name_b: str) -> list[Difference]:
    """Weights and optimizer state of two checkpoints, tensor by tensor, in the order of the first.

    Raises:
        CheckpointError: one of them is absent or damaged.
    """
    with open_verified(store_a, name_a) as (a, files_a), open_verified(store_b, name_b) as (b, files_b):
        return [
            _compare(files_a, a, files_b, b, parameter, key)
            for parameter in {**a.parameters, **b.parameters}
            for key in dict.fromkeys(key for m in (a, b) if parameter in m.parameters for key in m.keys_of(parameter))
        ]


@contextmanager
def open_verified(store: Store, name: str, purpose: str = "read") -> Iterator[tuple[Manifest, CheckpointFiles]]:
    """A checkpoint whose every byte was found as written; it is not deleted while it is open.

    Raises:
        CheckpointError: the checkpoint is absent or damaged.
    """
    with reading(store, name, purpose):
        manifest = _verified(store, name)
        yield manifest, CheckpointFiles(only_in(store.child(name)), manifest, num_threads())


def _is_weight(manifest: Manifest, parameter: str) -> bool:
    return manifest.groups[parameter] != BUFFER


def _compare(
    files_a: CheckpointFiles, a: Manifest, files_b: CheckpointFiles, b: Manifest, parameter: str, key: str
) -> Difference:
    in_both = all(parameter in m.parameters and key in m.keys_of(parameter) for m in (a, b))
    if not in_both or a.parameters[parameter] != b.parameters[parameter]:
        return Difference(parameter, key, False, None)
    left, right = _whole(files_a, a, parameter, key), _whole(files_b, b, parameter, key)
    if torch.equal(left.view(-1).view(torch.uint8), right.view(-1).view(torch.uint8)):  # bit for bit, NaN included
        return Difference(parameter, key, True, 0.0)
    return Difference(parameter, key, False, float((left.double() - right.double()).abs().max()))


def _whole(files: CheckpointFiles, manifest: Manifest, parameter: str, key: str) -> torch.Tensor:
    """A whole tensor; floating point state is read as fp32, which holds bf16 exactly."""
    shape = manifest.parameters[parameter]
    dtype = files.dtype(key, parameter)
    flat = torch.empty(math.prod(shape), dtype=torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype)
    files.fill(flat, key, parameter, 0)
    return flat.view(shape)


def _verified(store: Store, name: str) -> Manifest:
    problems = verify_checkpoint(store, name, sidecars=False)
    if problems:
        raise CheckpointError(f"checkpoint={name} in {store.url} is damaged: {'; '.join(problems)}. Use another one.")
    return read_manifest(store, name)
