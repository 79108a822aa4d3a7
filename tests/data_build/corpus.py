"""Small corpora, and reading built sources back with the stock webdataset library."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from webdataset.tariterators import group_by_keys, tar_file_expander

from pretrain.data.build import BuildOptions
from pretrain.data.format import Manifest, read_manifest
from pretrain.data.sources import SourceSpec
from pretrain.store import open_store

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "def", "return", "größe", "x=1", "日本")


def random_text(rng: random.Random, longest: int = 40) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, longest)))


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def numbered_texts(count: int, seed: int = 0) -> list[str]:
    """Different documents of different lengths."""
    rng = random.Random(seed)
    return [f"{number} {random_text(rng)}" for number in range(count)]


def text_options(inputs: Path, out: Path, tokenizer: str, **changes: Any) -> BuildOptions:
    values: dict[str, Any] = {"block_tokens": 64, "shard_blocks": 16, "workers": 1, **changes}
    return BuildOptions(SourceSpec((str(inputs),)), str(out), tokenizer, **values)


def pair_options(inputs: Path, out: Path, tokenizer: str, **changes: Any) -> BuildOptions:
    spec = SourceSpec((str(inputs),), source_field="en", target_field="de")
    values: dict[str, Any] = {"source_length": 48, "target_length": 64, "rows_per_block": 4, "shard_blocks": 4}
    return BuildOptions(spec, str(out), tokenizer, **{**values, "workers": 1, **changes})


def file_hashes(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def manifest_of(directory: Path | str) -> Manifest:
    return read_manifest(open_store(directory))


def webdataset_blocks(directory: Path | str) -> list[dict[str, Any]]:
    """The blocks as the stock library reads them: numbers as arrays, the provenance as JSON."""
    blocks = []
    for shard in sorted(Path(directory).glob("*.tar")):
        # The library's own reader without its opening of files, which it leaves to the garbage collector.
        with shard.open("rb") as stream:
            for sample in group_by_keys(tar_file_expander([{"url": str(shard), "stream": stream}])):
                block: dict[str, Any] = {"key": sample["__key__"]}
                for name, data in sample.items():
                    if name.endswith((".u1", ".u2", ".u4")):
                        block[name.rpartition(".")[0]] = np.frombuffer(data, dtype="<" + name[-2:]).tolist()
                    elif name == "json":
                        block["json"] = json.loads(data)
                blocks.append(block)
    return blocks


def documents_in(directory: Path | str, eos_id: int) -> list[list[int]]:
    """Ids of each document of a text source in corpus order, without the end token, by splitting at eos."""
    manifest = manifest_of(directory)
    stream = [token for block in webdataset_blocks(directory) for token in block["tok"][:-1]]
    found: list[list[int]] = [[]]
    for token in stream[: manifest.tokens]:
        if token == eos_id:
            found.append([])
        else:
            found[-1].append(token)
    assert found.pop() == []
    return found


def pairs_in(directory: Path | str) -> list[list[tuple[list[int], list[int]]]]:
    """Rows of (source ids, target ids) of a pair source, cut by the document ends alone."""
    manifest = manifest_of(directory)
    rows = []
    for block in webdataset_blocks(directory):
        for row in range(manifest.rows_per_block):
            sides = []
            for side, capacity in (("src", manifest.source_capacity), ("tgt", manifest.target_capacity)):
                low, high = row * capacity, (row + 1) * capacity
                start, documents = low, []
                for end in block[f"{side}.end"]:
                    if low < end <= high:
                        documents.append(block[side][start:end])
                        start = end
                assert set(block[side][start:high]) <= {manifest.pad_id}
                assert start < high, "each row keeps a free slot"
                sides.append(documents)
            rows.append(list(zip(*sides, strict=True)))
    return rows
