"""Other block sizes, rows or shards for a built source, without tokenising again.

Takes a source and a `RepackOptions` -> gives OUT, byte for byte what a build of the same text with these options
gives. Documents that the source has left out or cut are gone: where a fresh build would have them, it is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

from pretrain.data.build_report import BuildProgress
from pretrain.data.build_stages import StageRunner, drop_stage
from pretrain.data.format import MAX_BLOCK_TOKENS, Manifest, read_manifest
from pretrain.data.layout import Layout, LayoutStages, publish
from pretrain.data.output import BUILD_KEY, Output
from pretrain.data.packing import OverLong
from pretrain.data.part import PartInfo, PartList
from pretrain.data.progress import ProgressTeller
from pretrain.data.stage_pack import row_limits
from pretrain.data.task_pool import OwnProcess, WorkerProcesses
from pretrain.errors import DataError, StoreError
from pretrain.store import open_store

_IN_PROCESS_TOKENS = 2**20


@dataclass(frozen=True, slots=True)
class RepackOptions:
    """What to change; None keeps what the source has. See `BuildOptions`."""

    source: str
    out: str
    name: str | None = None
    block_tokens: int | None = None
    row_tokens: int | None = None
    rows_per_block: int | None = None
    source_length: int | None = None
    target_length: int | None = None
    shard_blocks: int | None = None
    over_long: OverLong | None = None
    workers: int | None = None


def repack(
    options: RepackOptions, progress: Callable[[BuildProgress], None] = lambda progress: None
) -> tuple[Manifest, Manifest]:
    """The manifests of the source and of OUT. Goes on where an unfinished repack ended.

    Raises:
        DataError: wrong options, a source that is damaged or has lost what is asked for, an output that exists.
        StoreError: reading or writing failed.
    """
    source = open_store(options.source)
    before = read_manifest(source)
    header, over_long = _new_header(options, before)
    output = Output(options.out)
    try:
        with output:
            if output.committed:
                output.clean()
                raise DataError(
                    f"out={output.out} exists. A source is never changed. Choose another --out or remove it."
                )
            tokens = before.tokens + before.source_tokens
            workers = options.workers or (1 if tokens < _IN_PROCESS_TOKENS else len(os.sched_getaffinity(0)))
            with nullcontext(OwnProcess()) if workers == 1 else WorkerProcesses(workers, output.fileno()) as pool:
                stages = StageRunner(output.work, output.final, pool)
                manifest = _run(output, stages, source.url, before, header, over_long, ProgressTeller(progress, 1))
                output.commit()
    except OSError as error:
        raise StoreError(
            f"cannot write {error.filename or options.out}: {error.strerror}. Free space or choose another --out."
        ) from error
    return before, manifest


def _run(
    output: Output,
    stages: StageRunner,
    url: str,
    before: Manifest,
    header: Manifest,
    over_long: str,
    teller: ProgressTeller,
) -> Manifest:
    work = output.work
    key = hashlib.sha256(json.dumps([before.sha256, header.body(), over_long], sort_keys=True).encode()).hexdigest()[
        :16
    ]
    folders = {"unpack": f"unpack-{before.sha256[:16]}", "pack": f"pack-{key}", "write": f"write-{key}"}
    for name in work.names():
        if name not in folders.values() and name != BUILD_KEY:
            drop_stage(work, name)
    work.put(BUILD_KEY, json.dumps({"repack": before.sha256}).encode())
    teller.phase("read", before.text_bytes)
    (unpacked,) = stages.run(
        "unpack", folders["unpack"], dict, lambda: [{"url": url}], teller.tick, lambda result: None
    )
    parts = {"train": PartList([PartInfo(*part) for part in unpacked["parts"]])}
    shard_blocks = header.options["shard_blocks"]
    layout = LayoutStages(Layout({"train": header}, {"train": ""}, over_long, shard_blocks), folders, stages, teller)
    tables = layout.pack(parts) if header.packed else {}
    if tables and not sum(table["rows"] for table in tables["train"]):
        raise DataError(f"source {before.name}: no document fits a row. Raise the lengths of rows.")
    manifests = layout.manifests(layout.write(parts, tables), tables)
    publish(output.final, {"train": ""}, manifests)
    return manifests["train"]


def _new_header(options: RepackOptions, before: Manifest) -> tuple[Manifest, OverLong]:
    """The new manifest without counts, and what happens to documents that no row can hold."""
    over_long = options.over_long or before.options.get("over_long", "fail")
    pairs = before.kind == "pairs"
    wrong = ("block_tokens", "row_tokens") if pairs else ("rows_per_block", "source_length", "target_length")
    for name in wrong:
        if getattr(options, name) is not None:
            raise DataError(f"{name} does not fit source {before.name}, which holds {before.kind}. Leave it out.")
    if "shard_blocks" not in before.options:
        raise DataError(
            f"source {before.name} does not say how it was built. Repacking needs a source of `pretrain data build`. "
            "Build it again."
        )

    def chosen(name: str, old: int) -> int:
        value = getattr(options, name)
        return old if value is None else value

    header = replace(
        before,
        name=before.name if options.name is None else options.name,
        block_tokens=chosen("block_tokens", before.block_tokens),
        row_tokens=chosen("row_tokens", before.row_tokens),
        rows_per_block=chosen("rows_per_block", before.rows_per_block),
        source_capacity=chosen("source_length", before.source_capacity),
        target_capacity=chosen("target_length", before.target_capacity),
        options=before.options
        | {"shard_blocks": chosen("shard_blocks", before.options["shard_blocks"]), "over_long": over_long},
        blocks=0,
        documents=0,
        tokens=0,
        source_tokens=0,
        text_bytes=0,
        fill_fraction=0.0,
        dropped=before.dropped,
        shortened=0,
        shards=(),
        sha256="",
    )
    _check_layout(header, over_long)
    _check_losses(before, header, over_long)
    return header, over_long


def _check_layout(header: Manifest, over_long: str) -> None:
    problems = []
    if header.kind == "pairs":
        for name in ("source_capacity", "target_capacity"):
            value = getattr(header, name)
            if not 3 <= value <= MAX_BLOCK_TOKENS // max(header.rows_per_block, 1):
                flag = name.replace("capacity", "length")
                problems.append(
                    f"{flag}={value} is out of range. Rows of pairs have 3 slots or more. "
                    f"Change --{flag.replace('_', '-')}."
                )
        if header.rows_per_block < 1:
            problems.append(f"rows_per_block={header.rows_per_block} is out of range. A block has rows. Set 1 or more.")
        if over_long == "split":
            problems.append("over_long=split would tear pairs apart. Set --over-long fail, drop or cut.")
    else:
        if not 2 <= header.block_tokens <= MAX_BLOCK_TOKENS:
            problems.append(f"block_tokens={header.block_tokens} is out of range. Set 2 to {MAX_BLOCK_TOKENS}.")
        if header.row_tokens and (header.row_tokens < 2 or header.block_tokens % header.row_tokens):
            problems.append(
                f"block_tokens={header.block_tokens} is no multiple of row_tokens={header.row_tokens}. A block holds "
                "whole rows. Set --block-tokens to a multiple."
            )
    if not 1 <= header.options["shard_blocks"] <= 10**6:
        problems.append(f"shard_blocks={header.options['shard_blocks']} is out of range. Set 1 to 1000000.")
    if problems:
        raise DataError("\n".join(problems))


def _check_losses(before: Manifest, header: Manifest, over_long: str) -> None:
    """Raises DataError if a fresh build would hold text that the source has not."""
    remedy = "Build again from the text with `pretrain data build`."
    if before.shortened:
        raise DataError(f"source {before.name} has cut {before.shortened:,} documents, whose ends are gone. {remedy}")
    if before.dropped:
        smaller = header.packed and all(
            new <= old for new, old in zip(row_limits(header), row_limits(before), strict=True)
        )
        if not (smaller and over_long == "drop"):
            raise DataError(
                f"source {before.name} has left out {before.dropped:,} documents that were too long, and a build with "
                f"these options would not. Rows may become smaller, with --over-long drop. {remedy}"
            )
