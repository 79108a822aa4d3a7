"""A rank's state in host memory, laid out as the bytes of its file: the only part of a save that a loop waits for.

takes -> fragments of the engine; gives -> a HostCopy, written as it lies. Its memory is used again by
the next save of the same engine; a save that overlaps with another one gets memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch

from pretrain.checkpoint.files import CHUNK_BYTES
from pretrain.checkpoint.format import safetensors_header, tensor_name
from pretrain.engine.state import MASTER, Fragment, Stateful


@dataclass
class HostCopy:
    """This rank's state as the bytes of its file; the data buffer is used again by the next save."""

    header: bytes = b""
    data: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    used: int = 0

    def take(self, fragments: list[Fragment], keys: tuple[str, ...], metadata: dict[str, str]) -> None:
        """Copies every fragment's tensors, key by key. The only part of a save that the loop waits for."""
        order = [(key, fragment) for key in keys for fragment in fragments]
        order.sort(key=lambda entry: -entry[1].tensors[entry[0]].element_size())  # stable; keeps all aligned
        sizes = [(tensor_name(key, f.name), f.tensors[key].dtype, f.length) for key, f in order]
        self.header = safetensors_header(sizes, metadata)
        self.used = sum(dtype.itemsize * count for _, dtype, count in sizes)
        if self.data.numel() < self.used:
            pin = any(f.tensors[MASTER].is_cuda for f in fragments[:1])
            self.data = torch.empty(self.used, dtype=torch.uint8, pin_memory=pin)
        position = 0
        for (key, fragment), (_, dtype, count) in zip(order, sizes, strict=True):
            end = position + count * dtype.itemsize
            self.data[position:end].view(dtype).copy_(fragment.tensors[key], non_blocking=True)
            position = end
        if self.data.is_pinned():
            torch.cuda.synchronize()

    def chunks(self) -> Iterator[memoryview]:
        yield memoryview(self.header)
        view = memoryview(self.data[: self.used].numpy())
        for start in range(0, self.used, CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]


_idle_copies: WeakKeyDictionary[Stateful, list[HostCopy]] = WeakKeyDictionary()


def idle_copies(engine: Stateful) -> list[HostCopy]:
    """Copies of finished saves of an engine, free to be used again; lives as long as the engine."""
    return _idle_copies.setdefault(engine, [])
