"""A rank's state in host memory, laid out as the bytes of its file: the only part of a save that a loop waits for.

takes -> fragments of the engine; gives -> a HostCopy, written as it lies. Its memory is used again by
the next save of the same engine; a save that overlaps with another one gets memory of its own. Fresh
memory costs a loop three times the copy (2.4 s for 0.8 s of 618 MB, measured): the kernel finds and
clears each page at its first touch. So the first buffer is made and touched ahead of the first save.
Large pages were no faster to touch here: 0.39 s of CPU against 0.27 s.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import torch

from pretrain.checkpoint.digests import chunk_bounds
from pretrain.checkpoint.format import safetensors_header, tensor_name
from pretrain.engine.state import MASTER, Fragment, Savable
from pretrain.store.direct import ALIGNMENT

PADDING = "padding|"  # the names of tensors that hold nothing begin with it
_PIECE = 2**28  # bytes between two signs of life
_LARGE = 2**20  # bytes; where a smaller run begins does not matter


@dataclass
class HostCopy:
    """This rank's state as the bytes of its file, header first; the buffer is used again by the next save."""

    data: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    used: int = 0
    header_bytes: int = 0

    def take(
        self, fragments: list[Fragment], metadata: dict[str, str], tell: Callable[[str], None] = lambda phase: None
    ) -> None:
        """Copies every fragment's tensors, key by key. The only part of a save that the loop waits for.

        Args:
            tell: called with what is done: `allocate` before memory is asked for, `copy` as the copy goes on.
        """
        runs = _runs([(tensor_name(key, f.name), f.tensors[key].detach(), key) for f in fragments for key in f.tensors])
        entries = [(name, tensor.dtype, tensor.numel()) for run in runs for name, tensor in run.tensors]
        header = safetensors_header(entries, metadata)
        self.header_bytes = len(header)
        self.used = len(header) + sum(run.padding + run.source.nbytes for run in runs)
        if self.data.numel() < self.used:
            tell("allocate")  # where memory is pinned, that takes many times the copy
            self.data = _buffer(self.used, pinned=any(run.source.is_cuda for run in runs[:1]))
            tell("copy")
        self.data[: len(header)].numpy()[:] = np.frombuffer(header, dtype=np.uint8)
        position = len(header)
        for run in runs:
            self.data[position : position + run.padding] = 0
            position += run.padding
            source, target = run.source, self.data[position : position + run.source.nbytes]
            if source.device.type == "cpu" and source.is_contiguous():
                # memcpy, which goes around the caches: torch's own copy takes 1.26 times as long.
                there, here = target.numpy(), source.view(torch.uint8).numpy()
                for start in range(0, here.size, _PIECE):
                    np.copyto(there[start : start + _PIECE], here[start : start + _PIECE])
                    tell("copy")
            else:
                target.view(source.dtype).copy_(source, non_blocking=True)
            position += source.nbytes
        if self.data.is_pinned():
            torch.cuda.synchronize()

    def put_in_header(self, blank: bytes, value: bytes) -> None:
        """Replaces a word of the metadata by one of the same length, which was not known before the copy."""
        header = self.data[: self.header_bytes].numpy()
        place = header.tobytes().index(blank)
        header[place : place + len(blank)] = np.frombuffer(value, dtype=np.uint8)

    def chunks(self) -> list[memoryview]:
        """The file's bytes in the pieces that are hashed."""
        view = memoryview(self.data[: self.used].numpy())
        return [view[start:stop] for start, stop in chunk_bounds(self.used)]


@dataclass
class _Run:
    """Tensors that follow each other in memory and in the file, behind `padding` bytes: one large copy.

    Attributes:
        source: all of them as one tensor.
        tensors: (name, tensor), the padding's first.
    """

    source: torch.Tensor
    tensors: list[tuple[str, torch.Tensor]]
    padding: int = 0


def _runs(tensors: list[tuple[str, torch.Tensor, str]]) -> list[_Run]:
    """In which order tensors (name, tensor, key) are copied: neighbours in memory are neighbours in the file.

    A large run begins at a page of the file, as the partitions of ZeRO do in memory. A copy whose target lies a little
    behind its source within their pages takes three times as long: the processor takes each load for one of the bytes
    just stored (0.08 to 0.10 s of CPU for 300 MB against 0.03 s).
    """
    keys = list(dict.fromkeys(key for _, _, key in tensors))
    # Large elements first keeps all aligned.
    tensors.sort(key=lambda entry: (-entry[1].element_size(), keys.index(entry[2]), entry[1].data_ptr()))
    runs: list[_Run] = []
    for name, tensor, _ in tensors:
        last = runs[-1].source if runs else None
        if last is not None and _follows(last, tensor):
            runs[-1].source = last.as_strided((last.numel() + tensor.numel(),), (1,), last.storage_offset())
            runs[-1].tensors.append((name, tensor))
        else:
            runs.append(_Run(tensor, [(name, tensor)]))
    position = 0
    for number, run in enumerate(runs):
        if run.source.nbytes >= _LARGE and position % ALIGNMENT:
            run.padding = -position % ALIGNMENT
            run.tensors.insert(0, (f"{PADDING}{number}", torch.empty(run.padding, dtype=torch.uint8, device="meta")))
        position += run.padding + run.source.nbytes
    return runs


def _follows(first: torch.Tensor, second: torch.Tensor) -> bool:
    return (
        first.dtype == second.dtype
        and first.is_contiguous()
        and second.is_contiguous()
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.storage_offset() + first.numel() == second.storage_offset()
    )


def _buffer(size: int, *, pinned: bool) -> torch.Tensor:
    """Memory that begins at a page, as writing past the page cache wants it."""
    whole = torch.empty(size + ALIGNMENT, dtype=torch.uint8, pin_memory=pinned)
    start = -whole.data_ptr() % ALIGNMENT
    return whole[start : start + size]


def file_bytes(engine: Savable) -> int:
    """At most so many bytes has this rank's file once the optimizer has stepped; before, it has no state."""
    specs, groups = engine.optimizer_spec().groups, engine.groups()
    size, names = 0, []
    for fragment in engine.fragments():
        spec, values = specs.get(groups[fragment.name]), fragment.tensors[MASTER]
        for key in (MASTER, *(spec.element_keys if spec else ())):
            names.append((tensor_name(key, fragment.name), values.dtype, sys.maxsize // 8))
            size += values.numel() * values.element_size()
    padding = size // _LARGE * ALIGNMENT
    return size + padding + len(safetensors_header(names, {})) + ALIGNMENT


def prepare_copy(engine: Savable) -> threading.Thread | None:
    """Makes the buffer of the first save in a thread and touches every page of it, while training goes on.

    Returns:
        the thread, or None when there is nothing to make.
    """
    idle, fragments = idle_copies(engine), engine.fragments()
    if idle or not fragments:
        return None
    size = file_bytes(engine)
    pinned = fragments[0].tensors[MASTER].is_cuda

    def make() -> None:
        copy = HostCopy(data=_buffer(size, pinned=pinned).zero_())
        if not idle:  # a save may have been quicker
            idle.append(copy)

    thread = threading.Thread(target=make, name="first save's buffer", daemon=True)
    thread.start()
    return thread


_idle_copies: WeakKeyDictionary[Savable, list[HostCopy]] = WeakKeyDictionary()


def idle_copies(engine: Savable) -> list[HostCopy]:
    """Copies of finished saves of an engine, free to be used again; lives as long as the engine."""
    return _idle_copies.setdefault(engine, [])
