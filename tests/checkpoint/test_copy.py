"""The host copy of a save: the bytes of a safetensors file, whose large pieces lie as they do in memory."""

from __future__ import annotations

import json
import struct

import safetensors.torch
import torch

from pretrain.checkpoint.copy import PADDING, HostCopy
from pretrain.engine.state import MASTER, Fragment
from pretrain.store.direct import ALIGNMENT

SIZES = (200_003, 70_001, 5)  # of the pieces of a partition; all three in one copy, of more than 1 MiB


def _fragments(seed: int) -> list[Fragment]:
    """Three parameters whose master and moment are neighbours in a partition each, and a small one of its own."""
    generator = torch.Generator().manual_seed(seed)
    flats = {key: torch.randn(sum(SIZES), generator=generator) for key in (MASTER, "exp_avg")}
    ends = torch.tensor(SIZES).cumsum(0).tolist()
    fragments = [
        Fragment(f"p{number}", (size,), 0, {key: flat[end - size : end] for key, flat in flats.items()})
        for number, (size, end) in enumerate(zip(SIZES, ends, strict=True))
    ]
    return [*fragments, Fragment("count", (3,), 0, {MASTER: torch.tensor([1, 2, 3], dtype=torch.int64)})]


def test_a_copy_is_a_file_for_other_tools_and_its_large_runs_begin_at_pages() -> None:
    fragments, copy = _fragments(1), HostCopy()
    told: list[str] = []
    copy.take(_fragments(2), {"format": "pt"}, told.append)  # what the buffer held before must not show
    # Memory is asked for first, which may take longer than the copy; then each large piece is a sign of life.
    assert told[:3] == ["allocate", "copy", "copy"]
    copy.take(fragments, {"format": "pt"}, told.append)
    assert set(told[1:]) == {"copy"}
    data = b"".join(bytes(chunk) for chunk in copy.chunks())
    tensors = safetensors.torch.load(data)
    padding = {name: tensor for name, tensor in tensors.items() if name.startswith(PADDING)}
    assert all(not tensor.any() for tensor in padding.values())
    assert sum(tensor.numel() for tensor in padding.values()) < 2 * ALIGNMENT
    expected = {f"{key}|{f.name}": tensor for f in fragments for key, tensor in f.tensors.items()}
    assert tensors.keys() - padding.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    (length,) = struct.unpack("<Q", data[:8])
    offsets = {name: 8 + length + entry["data_offsets"][0]
               for name, entry in json.loads(data[8 : 8 + length]).items() if name != "__metadata__"}  # fmt: skip
    assert [offsets[f"{key}|p0"] % ALIGNMENT for key in (MASTER, "exp_avg")] == [0, 0]
    assert offsets["exp_avg|p1"] == offsets["exp_avg|p0"] + 4 * SIZES[0]  # a partition is one piece
