"""Process group of the ranks and the few collectives outside DeepSpeed.

takes -> World, device, timeout; gives -> exact sums, votes, broadcasts, the same on every rank.
Everything here runs on host tensors over gloo, also beside NCCL, so nothing waits for a device.
A collective that breaks because a rank is gone becomes PeerFailedError. Source: own.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from pretrain.errors import PeerFailedError, PretrainError, UserError
from pretrain.topology import World

_PEER_MARKS = ("gloo", "Connection closed by peer", "Connection reset by peer", "Socket Timeout", "NCCL", "Broken pipe")
_LIMB_BITS = 32
_SHORT = 504  # bytes of a text that go with its length in one message


def start_process_group(world: World, device: torch.device, timeout_s: float) -> bool:
    """Joins all ranks; a collective. False when a group is up already: it is used and belongs to who started it.

    Rank 0 serves the rendezvous on the inherited listening socket PRETRAIN_MASTER_FD when there is
    one (no race for the port), else on MASTER_ADDR:MASTER_PORT as torchrun sets them. One rank needs neither.

    Raises:
        UserError: several ranks but no MASTER_ADDR and MASTER_PORT.
        PeerFailedError: the others did not come within `timeout_s`.
    """
    if dist.is_initialized():
        return False
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if world.size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return True
    if not address or not port:
        raise UserError(
            f"MASTER_ADDR={address} MASTER_PORT={port} with {world.size} ranks. Ranks meet at that address. "
            "Start them with torchrun or pretrain train."
        )
    if address in ("127.0.0.1", "localhost", "::1"):
        # gloo otherwise resolves the host's name, which containers without a network cannot.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with collective("process group"):
        if "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
            dist.init_process_group(backend, init_method="env://", timeout=timeout)
            return True
        listen_fd = os.environ.get("PRETRAIN_MASTER_FD") if world.is_main else None
        store = dist.TCPStore(
            address,
            int(port),
            world.size,
            is_master=world.is_main,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=None if listen_fd is None else int(listen_fd),
        )
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    return True


def stop_process_group() -> None:
    """Leaves the group; no error if there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()


def limit_collectives(timeout: timedelta) -> None:
    """Gives every group the timeout of the first one; DeepSpeed makes its own with 30 minutes."""
    for group in list(dist.distributed_c10d._world.pg_map):
        for device in group._device_types:
            group._get_backend(device)._set_default_timeout(timeout)


@contextmanager
def collective(what: str) -> Iterator[None]:
    """Turns the error of a collective whose peer is gone into PeerFailedError naming `what`."""
    try:
        yield
    except PretrainError:
        raise
    except (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError) as error:
        raise PeerFailedError(f"{what}: another rank is gone or silent ({_first_line(error)})") from error
    except RuntimeError as error:
        if any(mark in str(error) for mark in _PEER_MARKS):
            raise PeerFailedError(f"{what}: another rank is gone or silent ({_first_line(error)})") from error
        raise


def all_reduce_sums(values: Sequence[int | float]) -> list[int | float]:
    """Sums of each value over the ranks; a collective, one message.

    Integers add exactly (up to 95 bits), floats add as if in infinite precision and round once, so the result
    does not depend on the order of the ranks. Every rank passes the same number and kinds of values.
    """
    kinds = [isinstance(value, float) for value in values]
    lanes = torch.zeros(2 * len(values), dtype=torch.int64)
    for i, value in enumerate(values):
        if kinds[i]:
            lanes[2 * i] = torch.tensor(value, dtype=torch.float64).view(torch.int64)
        else:
            lanes[2 * i] = int(value) & ((1 << _LIMB_BITS) - 1)
            lanes[2 * i + 1] = int(value) >> _LIMB_BITS
    gathered = _all_gather(lanes, "sums")
    return [
        _sum_floats(gathered[:, 2 * i].contiguous().view(torch.float64).tolist())
        if is_float
        else sum(low + (high << _LIMB_BITS) for low, high in gathered[:, 2 * i : 2 * i + 2].tolist())
        for i, is_float in enumerate(kinds)
    ]


def gather_floats(values: Sequence[float]) -> list[list[float]]:
    """Every rank's values, in rank order, on every rank; a collective, one message."""
    rows: list[list[float]] = _all_gather(torch.tensor(values, dtype=torch.float64), "values of ranks").tolist()
    return rows


def gather_texts(text: str) -> list[str]:
    """Every rank's text, in rank order, on every rank; a collective, one message while texts are short."""
    data = text.encode()
    rows = _all_gather(_row(struct.pack("<Q", len(data)) + data[:_SHORT], 8 + _SHORT), "texts")
    texts = [row.numpy().tobytes() for row in rows]
    lengths = [struct.unpack("<Q", start[:8])[0] for start in texts]
    rest = max(lengths) - _SHORT
    rests = [row.numpy().tobytes() for row in _all_gather(_row(data[_SHORT:], rest), "texts")] if rest > 0 else []
    whole = [start[8:] + (rests[rank] if rests else b"") for rank, start in enumerate(texts)]
    return [text[:length].decode() for text, length in zip(whole, lengths, strict=True)]


def _row(data: bytes, width: int) -> torch.Tensor:
    """Bytes as a tensor, filled up with zeros."""
    return torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8)


def broadcast_bytes(data: bytes | None, *, source: int = 0) -> bytes:
    """The bytes of rank `source` on every rank; a collective. Others pass None."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return data or b""
    with collective("broadcast"):
        length = torch.tensor([len(data or b"")])
        dist.broadcast(length, source)
        buffer = bytearray(int(length)) or bytearray(1)
        if data:
            buffer[:] = data
        tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        dist.broadcast(tensor, source)
        return bytes(buffer[: int(length)])


def vote(ok: bool, message: str = "", *, error: type[PretrainError] = PretrainError) -> None:
    """All ranks learn whether any failed; a collective.

    Raises:
        error: on every rank, when at least one voted no; names each such rank with its message.
    """
    texts = gather_texts("" if ok else (message or "failed"))
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    if failed:
        distinct = {text for text in texts if text}
        raise error(distinct.pop() if len(distinct) == 1 and len(failed) == len(texts) else "; ".join(failed))


def barrier() -> None:
    """Waits for all ranks; a collective."""
    _all_gather(torch.zeros(1, dtype=torch.int64), "barrier")


def _all_gather(row: torch.Tensor, what: str) -> torch.Tensor:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return row.unsqueeze(0)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    with collective(what):
        dist.all_gather(rows, row)
    return torch.stack(rows)


def _sum_floats(values: list[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # inf - inf, or beyond float64
        return sum(values)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:300]
