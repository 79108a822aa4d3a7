"""safetensors files written tensor by tensor, so that one tensor at a time is in memory.

Takes names, shapes and a way to make each tensor -> model.safetensors, or numbered shards and their index,
as transformers names them. Headers need only shapes, so they are written before any tensor is read.
Source: the safetensors format (8 bytes of length, a JSON header padded to 8 bytes, then the tensors' bytes).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHARD_BYTES = 5_000_000_000
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that is to be written; `make` gives it in any dtype, with this shape."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


def write_shards(
    folder: Path, entries: Sequence[Entry], dtype: torch.dtype, *, shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Writes all entries in their order; the paths of the safetensors files.

    Raises:
        ValueError: a tensor came with another shape than it was announced with.
    """
    shards = _divide(entries, dtype.itemsize, shard_bytes)
    if len(shards) == 1:
        return [_write(folder / "model.safetensors", shards[0], dtype)]
    paths: list[Path] = []
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        path = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        paths.append(_write(path, shard, dtype))
        where |= {entry.name: path.name for entry in shard}
    total = sum(_bytes(entry, dtype.itemsize) for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return paths


def _bytes(entry: Entry, itemsize: int) -> int:
    return math.prod(entry.shape) * itemsize


def _divide(entries: Sequence[Entry], itemsize: int, shard_bytes: int) -> list[list[Entry]]:
    """Consecutive entries of at most `shard_bytes`; a larger one is alone."""
    shards: list[list[Entry]] = [[]]
    used = 0
    for entry in entries:
        size = _bytes(entry, itemsize)
        if shards[-1] and used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(entry)
        used += size
    return shards


def _write(path: Path, entries: Sequence[Entry], dtype: torch.dtype) -> Path:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for entry in entries:
        end = position + _bytes(entry, dtype.itemsize)
        header[entry.name] = {"dtype": _DTYPES[dtype], "shape": list(entry.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in entries:
            file.write(_content(entry, dtype))  # a name for it would keep it while the next one is read
    return path


def _content(entry: Entry, dtype: torch.dtype) -> memoryview:
    tensor = entry.make().detach()
    if tuple(tensor.shape) != entry.shape:
        raise ValueError(f"{entry.name} has shape {tuple(tensor.shape)} instead of {entry.shape}")
    return memoryview(tensor.to(dtype).contiguous().view(-1).view(torch.uint8).numpy())
