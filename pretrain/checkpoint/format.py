"""What a checkpoint is: names, manifest, and the layout of a rank's file. PURE.

    step-00001200-a003/rank-00000.safetensors   flat fp32 ranges, tensors named "key|parameter"
    step-00001200-a003/rank-00000.json          sidecar: bytes, sha256 and ranges of that file
    step-00001200-a003/MANIFEST.json            published last; without it there is no checkpoint

Manifest and sidecars are records that carry the sha256 of their canonical body. A later attempt goes
on from an earlier one's checkpoints, so "newest" is the largest (attempt, step). Ranges are
[index of the parameter, first element, elements], in file order.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from typing import Any

import torch

from pretrain.checkpoint.digests import CHUNK_BYTES, chunk_bounds, pack, unpack
from pretrain.engine.state import MASTER
from pretrain.errors import CheckpointError, PretrainError
from pretrain.rundir.records import decode_record, encode_record
from pretrain.store.direct import ALIGNMENT

FORMAT_VERSION = 1
MANIFEST = "MANIFEST.json"
PART_SUFFIX = ".part.json"
_NAME = re.compile(r"step-(\d{8,})-a(\d{3,})")
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_REMEDY = "Use another checkpoint (pretrain checkpoint list RUN shows them)."

Range = tuple[int, int, int]


def checkpoint_name(step: int, attempt: int) -> str:
    """Name of the checkpoint after `step` steps that `attempt` saved."""
    return f"step-{step:08d}-a{attempt:03d}"


def parse_name(name: str) -> tuple[int, int] | None:
    """(attempt, step), by which checkpoints are ordered; None for a name that is no checkpoint's."""
    found = _NAME.fullmatch(name)
    return (int(found[2]), int(found[1])) if found else None


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def sidecar_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def part_file(rank: int) -> str:
    """Manifest of a single rank's file; all parts of a save together are the manifest (memory tier)."""
    return f"rank-{rank:05d}{PART_SUFFIX}"


def failure_file(rank: int) -> str:
    """Written in place of the sidecar by a rank that could not save; lets rank 0 stop waiting."""
    return f"rank-{rank:05d}.failed"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One rank's file as its writer saw it.

    Attributes:
        save_id: of the save that wrote it, so that files of two tries never mix.
        digests: sha256 of each `chunk_bytes` of the file, in order.
        ranges: which elements it holds; of each all keys that the parameter's group has.
    """

    name: str
    bytes: int
    digests: tuple[str, ...]
    save_id: str
    ranges: tuple[Range, ...]
    chunk_bytes: int = CHUNK_BYTES

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "bytes": self.bytes, "chunk_bytes": self.chunk_bytes, "sha256": pack(self.digests),
            "save_id": self.save_id, "ranges": [list(entry) for entry in self.ranges],
        }  # fmt: skip

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> FileEntry:
        ranges = tuple((int(a), int(b), int(c)) for a, b, c in body["ranges"])
        digests = unpack(body["sha256"])
        entry = cls(body["name"], int(body["bytes"]), digests, body["save_id"], ranges, int(body["chunk_bytes"]))
        if len(digests) != len(chunk_bounds(entry.bytes, entry.chunk_bytes)):
            raise ValueError(f"{entry.name} has {len(digests)} checksums")
        return entry


@dataclass(frozen=True, slots=True)
class Manifest:
    """All of a checkpoint that is no tensor.

    Attributes:
        parameters: name -> shape, in the model's order, frozen ones and buffers too; ranges refer to it by position.
        groups: name -> the optimizer's group, or "frozen" or "buffer".
        optimizer: `kind`, and by name of the group `groups` of `element_keys`, `scalars` and `hyperparameters`.
        training_state: what the loop handed over.
        origin: ranks, ZeRO stage and precision that wrote it, versions; nothing of it decides the reading.
    """

    step: int
    attempt: int
    save_id: str
    parameters: dict[str, tuple[int, ...]]
    groups: dict[str, str]
    optimizer: dict[str, Any]
    training_state: dict[str, Any]
    origin: dict[str, Any]
    files: tuple[FileEntry, ...]

    @property
    def name(self) -> str:
        return checkpoint_name(self.step, self.attempt)

    @property
    def total_bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def keys_of(self, parameter: str) -> tuple[str, ...]:
        """What is there of a parameter: its values, and what the optimizer keeps of it."""
        kept = self.optimizer["groups"].get(self.groups[parameter])
        return (MASTER, *(kept["element_keys"] if kept else ()))

    def encode(self) -> bytes:
        """The file. JSON objects have no order, so the parameters are a list."""
        return encode_record(
            {
                "format_version": FORMAT_VERSION,
                "step": self.step,
                "attempt": self.attempt,
                "save_id": self.save_id,
                "parameters": [[name, list(shape), self.groups[name]] for name, shape in self.parameters.items()],
                "optimizer": self.optimizer,
                "training_state": self.training_state,
                "origin": self.origin,
                "files": [file.to_json() for file in self.files],
            }
        )

    @classmethod
    def decode(cls, data: bytes, where: str, *, part: bool = False) -> Manifest:
        """Reads and checks a manifest; a `part` need not cover everything.

        Raises:
            CheckpointError: it is damaged, of another format, or its ranges do not cover every parameter once.
        """
        try:
            body = decode_record(data, where, _REMEDY)
        except PretrainError as error:
            raise CheckpointError(str(error)) from None
        if body.get("format_version") != FORMAT_VERSION:
            raise CheckpointError(
                f"format_version={body.get('format_version')} of {where} is unknown. This version reads "
                f"{FORMAT_VERSION}. Read it with the version that wrote it."
            )
        try:
            manifest = cls(
                step=int(body["step"]),
                attempt=int(body["attempt"]),
                save_id=body["save_id"],
                parameters={name: tuple(shape) for name, shape, _ in body["parameters"]},
                groups={name: group for name, _, group in body["parameters"]},
                optimizer=body["optimizer"],
                training_state=body["training_state"],
                origin=body["origin"],
                files=tuple(FileEntry.from_json(entry) for entry in body["files"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{where} lacks something: {error!r}. {_REMEDY}") from None
        hole = None if part else manifest.first_hole()
        if hole:
            raise CheckpointError(f"{where} does not cover {hole} exactly once. {_REMEDY}")
        return manifest

    def first_hole(self) -> str | None:
        """The first parameter whose elements are not in exactly one range; None if all is there."""
        pieces: dict[int, list[tuple[int, int]]] = {}
        for file in self.files:
            for index, start, count in file.ranges:
                pieces.setdefault(index, []).append((start, count))
        for index, (name, shape) in enumerate(self.parameters.items()):
            position = 0
            for start, count in sorted(pieces.get(index, [])):
                if start != position:
                    return name
                position += count
            if position != math.prod(shape):
                return name
        return None


# ------------------------------------------------------------------------------------- safetensors


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where a tensor lies in a rank's file; `start` counts from the first byte of the file."""

    dtype: torch.dtype
    count: int
    start: int


def tensor_name(key: str, parameter: str) -> str:
    return f"{key}|{parameter}"


def safetensors_header(tensors: list[tuple[str, torch.dtype, int]], metadata: dict[str, str]) -> bytes:
    """Header of a file of 1-D tensors (name, dtype, elements) that follow each other without gaps.

    Padded with blanks to whole pages, so that the tensors can be written past the page cache.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for name, dtype, count in tensors:
        end = position + count * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": [count], "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def parse_safetensors_header(text: bytes, where: str) -> dict[str, TensorSlot]:
    """Tensors of a file from its header (without the eight bytes of its length).

    Raises:
        CheckpointError: it is no such header.
    """
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        base = 8 + len(text)
        return {
            name: TensorSlot(_DTYPES[entry["dtype"]], math.prod(entry["shape"]), base + entry["data_offsets"][0])
            for name, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{where} has no readable safetensors header ({error!r}). {_REMEDY}") from None
