"""What a build will do, and what of an unfinished one can be kept: keys of stages from everything that shapes them.

Takes options and the listed inputs -> gives a `BuildPlan`. PURE but for reading the tokenizer.
Invariants: a stage's key covers all that its files depend on (inputs by name, size and times, options,
the stages before), so files under an equal key are the same; workers and memory are in no key.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pretrain.data.build_options import BuildOptions
from pretrain.data.format import FORMAT_VERSION, Manifest
from pretrain.data.inputs import InputFile
from pretrain.data.stage_pack import row_limits
from pretrain.data.tokenizer import Tokenizer

STAGES = ("read", "encode", "pack", "write")
_STAGES_VERSION = 1  # of the private files
_PIECE_BYTES = 64 * 2**20
_PIECE_FILES = 4096
_LEAST_PIECES = 16  # tasks to share out also where there is little text
_LEAST_PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """
    Attributes:
        headers: by split, the manifest without counts.
        keys: by stage.
        described: options and inputs by name, for saying what has changed.
        pieces: files that are read together, numbers in `files`.
    """

    options: BuildOptions
    files: tuple[InputFile, ...]
    headers: dict[str, Manifest]
    keys: dict[str, str]
    described: dict[str, Any]
    pieces: tuple[tuple[int, ...], ...]

    def folder(self, stage: str) -> str:
        """Of a stage in the work store."""
        return f"{stage}-{self.keys[stage][:16]}"

    @property
    def folders(self) -> dict[str, str]:
        """Of each split below the output."""
        return {split: split if len(self.headers) > 1 else "" for split in self.headers}

    @property
    def packed(self) -> bool:
        return self.headers["train"].packed

    @property
    def expected_bytes(self) -> int:
        """About how much text the inputs hold."""
        return sum(file.text_bytes for file in self.files)


def make_plan(options: BuildOptions, files: Sequence[InputFile], tokenizer: Tokenizer) -> BuildPlan:
    """The plan of a build of these files."""
    spec = asdict(options.source)
    inputs = [list(file) for file in files]
    headers = {split: header_of(options, tokenizer, split) for split in options.splits}
    reading = {
        "version": [_STAGES_VERSION, FORMAT_VERSION],
        "files": inputs,
        "spec": {name: value for name, value in spec.items() if name != "inputs"},
        "seed": options.seed,
        "deduplicate": options.deduplicate,
        "validation_fraction": options.validation_fraction,
        "max_bytes": options.max_bytes,
    }
    layout = {split: header.body() for split, header in headers.items()}
    keys = chained_keys(_hash(reading), tokenizer.sha256, headers["train"], options.over_long, layout)
    described = {name: value for name, value in asdict(options).items() if name not in _SHAPES_NOTHING}
    described |= {
        "tokenizer": tokenizer.sha256[:12],
        "inputs": {file.origin: [file.size, file.stamp] for file in files},
    }
    return BuildPlan(options, tuple(files), headers, keys, json.loads(_dumps(described)), tuple(_pieces(files)))


_SHAPES_NOTHING = ("workers", "memory_bytes", "out", "work")


def chained_keys(
    reading: str, tokenizer_sha256: str, header: Manifest, over_long: str, layout: Mapping[str, Any]
) -> dict[str, str]:
    """Keys of all stages from that of the first."""
    encode = _hash([reading, tokenizer_sha256])
    pack = _hash([encode, row_limits(header) if header.packed else None, over_long])
    return {"read": reading, "encode": encode, "pack": pack, "write": _hash([pack, layout])}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`name: old -> new` for whatever differs, inputs by name."""
    lines = [
        f"{name}={now.get(name)} (was {before.get(name)})"
        for name in sorted({*before, *now} - {"inputs"})
        if before.get(name) != now.get(name)
    ]
    old, new = before.get("inputs", {}), now.get("inputs", {})
    for origin in sorted({*old, *new}):
        if old.get(origin) != new.get(origin):
            state = "is new" if origin not in old else "is gone" if origin not in new else "has changed"
            lines.append(f"input {origin} {state}")
    return lines


def header_of(options: BuildOptions, tokenizer: Tokenizer, split: str) -> Manifest:
    """The manifest of a split without counts."""
    source = options.source
    pairs = source.pairs
    name = options.name or os.path.basename(os.path.abspath(options.out.rstrip("/")))
    return tokenizer.manifest(
        name=f"{name}-validation" if split == "validation" else name,
        kind="pairs" if pairs else "tokens",
        block_tokens=0 if pairs else options.block_tokens,
        row_tokens=options.row_tokens,
        masked=source.trained is not None,
        rows_per_block=options.rows_per_block if pairs else 0,
        source_capacity=options.source_length,
        target_capacity=options.target_length,
        options={
            "source": {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in asdict(source).items()
                if name != "trained" or value is not None
            },
            "split": split,
            "validation_fraction": options.validation_fraction,
            "seed": options.seed,
            "deduplicate": options.deduplicate,
            "max_bytes": options.max_bytes,
            "shard_blocks": options.shard_blocks,
            "over_long": options.over_long,
        },
    )


def _pieces(files: Sequence[InputFile]) -> list[tuple[int, ...]]:
    """Neighbouring files together, so that a piece is worth a task."""
    pieces: list[tuple[int, ...]] = []
    piece: list[int] = []
    size = 0
    enough = max(sum(file.text_bytes for file in files) // _LEAST_PIECES, _LEAST_PIECE_BYTES)
    most = min(enough, _PIECE_BYTES)
    for number, file in enumerate(files):
        if piece and (size + file.text_bytes > most or len(piece) == _PIECE_FILES):
            pieces.append(tuple(piece))
            piece, size = [], 0
        piece.append(number)
        size += file.text_bytes
    return [*pieces, tuple(piece)]


def _dumps(value: Any) -> str:
    return json.dumps(value, sort_keys=True)  # ASCII: names of files may hold what is not UTF-8


def _hash(value: Any) -> str:
    return hashlib.sha256(_dumps(value).encode()).hexdigest()
