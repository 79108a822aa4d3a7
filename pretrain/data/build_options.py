"""What a build is told: options with their checks, all problems at once.

Takes plain values -> gives a `BuildOptions` that a build can follow. Only `workers`, `memory_bytes` and
`work` change nothing in the bytes that come out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from pretrain.data.format import MAX_BLOCK_TOKENS
from pretrain.data.packing import OverLong
from pretrain.data.sources import SourceSpec
from pretrain.errors import DataError


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What to build.

    Attributes:
        source: what to read; with source_field and target_field pairs are built.
        out: directory or URL that will appear.
        tokenizer: path of tokenizer.json.
        name: of the source; the directory's name if empty.
        block_tokens: tokens of a block of plain text.
        row_tokens: plain text is packed as whole documents into rows of so many tokens; 0 cuts it instead.
        over_long: what happens to a document that no row can hold: fail, drop, cut (pairs and rows) or split (rows).
        shard_blocks: blocks of a shard.
        source_length, target_length: capacities of a row of pairs; one slot of each stays free.
        rows_per_block: rows of a block of pairs.
        validation_fraction: share of documents held out by hash; 0 builds no validation source.
        seed: of the shuffle.
        deduplicate: a document whose content was seen before is dropped.
        max_bytes: only the documents with the smallest content hash that fit; None keeps all.
        workers: processes that work; None takes all CPUs, 1 works in this process.
        memory_bytes: about what all processes together may take for text, beside what they are; None bounds it by
            64 MB of text per process.
        work: where private files lie; None means beside `out`.
    """

    source: SourceSpec
    out: str
    tokenizer: str
    name: str = ""
    block_tokens: int = 65536
    row_tokens: int = 0
    over_long: OverLong = "fail"
    shard_blocks: int = 512
    source_length: int = 0
    target_length: int = 0
    rows_per_block: int = 64
    validation_fraction: float = 0.0
    seed: int = 0
    deduplicate: bool = True
    max_bytes: int | None = None
    workers: int | None = None
    memory_bytes: int | None = None
    work: str | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        """What is built."""
        return ("train", "validation") if self.validation_fraction else ("train",)

    def __post_init__(self) -> None:
        _check(self)


def _check(options: BuildOptions) -> None:
    """All options at once. Raises DataError."""
    problems = []

    def need(name: str, low: int, high: int, why: str) -> None:
        value = getattr(options, name)
        if not low <= value <= high:
            flag = "--memory" if name == "memory_bytes" else f"--{name.replace('_', '-')}"
            problems.append(f"{name}={value} is out of range. {why}. Set {flag} between {low} and {high}.")

    if not options.source.inputs:
        problems.append("no input is given. A build needs text. Name files, directories or patterns.")
    if options.source.pairs:
        why = "A row of pairs has a capacity on each side, one slot of which stays free"
        need("source_length", 3, MAX_BLOCK_TOKENS, why)
        need("target_length", 3, MAX_BLOCK_TOKENS, why)
        need("rows_per_block", 1, 2**20, "A block holds whole rows")
        if max(options.source_length, options.target_length) * options.rows_per_block > MAX_BLOCK_TOKENS:
            problems.append(f"a block of pairs would exceed {MAX_BLOCK_TOKENS} tokens. Set a smaller --rows-per-block.")
    else:
        need("block_tokens", 2, MAX_BLOCK_TOKENS, "A block is read as one piece")
        if options.row_tokens:
            need("row_tokens", 2, MAX_BLOCK_TOKENS, "A row holds whole documents")
            if options.row_tokens > 0 and options.block_tokens % options.row_tokens:
                problems.append(
                    f"block_tokens={options.block_tokens} is no multiple of row_tokens={options.row_tokens}. A block "
                    "holds whole rows. Set --block-tokens to a multiple."
                )
        if options.source_length or options.target_length:
            problems.append(
                "source_length and target_length are for pairs. Name their fields with --source-field and "
                "--target-field, or leave the lengths out."
            )
    if options.over_long not in get_args(OverLong):
        problems.append(
            f"over_long={options.over_long} is unknown. Set --over-long to {', '.join(get_args(OverLong))}."
        )
    elif options.over_long == "split" and options.source.pairs:
        problems.append("over_long=split would tear pairs apart. Set --over-long fail, drop or cut.")
    need("shard_blocks", 1, 10**6, "A shard holds whole blocks")
    need("seed", 0, 2**63 - 1, "The seed is a 63-bit number")
    if options.workers is not None:
        need("workers", 1, 1024, "Each worker is a process")
    if options.memory_bytes is not None:
        need("memory_bytes", 2**20, 2**50, "Sorting needs room")
    if not 0 <= options.validation_fraction < 1:
        problems.append(
            f"validation_fraction={options.validation_fraction:g} is out of range. It is the share that is held out. "
            "Set --validation-fraction from 0 up to, not including, 1."
        )
    if options.max_bytes is not None and options.max_bytes < 1:
        problems.append(f"max_bytes={options.max_bytes} keeps nothing. Set --max-bytes to 1 or more.")
    if problems:
        raise DataError("\n".join(problems))
