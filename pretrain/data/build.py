"""Builds sources: raw text -> shuffled, split, tokenised, packed block shards.

Takes `BuildOptions` -> gives OUT (or OUT/train and OUT/validation with a validation fraction), complete or
not at all, and a `BuildReport`. Stages of tasks: read (hash and sort into runs), encode (merge ranges, tokenise),
pack (rows of whole documents only), write (a shard each); then the manifests.
Invariants: the bytes are a function of inputs and options, not of workers, memory or time, nor of how
often it was killed: what a killed build has done is kept and not done again; memory is bounded by
runs and ranges, not by the corpus; whatever is left out is counted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from pretrain.data.build_options import BuildOptions
from pretrain.data.build_plan import STAGES, BuildPlan, changes, make_plan
from pretrain.data.build_report import BuildProgress, BuildReport
from pretrain.data.build_stages import StageRunner, drop_stage
from pretrain.data.documents import ReadCounts, check_fields_seen
from pretrain.data.format import Manifest
from pretrain.data.histogram import merge_histograms
from pretrain.data.layout import Layout, LayoutStages, over_long_error, publish
from pretrain.data.output import BUILD_KEY, REPORT_KEY, Output
from pretrain.data.part import PartInfo, PartList, number_parts
from pretrain.data.progress import ProgressTeller
from pretrain.data.selection import DIGEST_BYTES, Selection, nothing_to_build
from pretrain.data.sources import list_files
from pretrain.data.spill import RANGE_BYTES, RUN_BYTES, Run, ranges_of, slot_sizes
from pretrain.data.task_pool import OwnProcess, TaskPool, WorkerProcesses
from pretrain.data.tasks import TOKENIZER
from pretrain.data.tokenizer import Tokenizer
from pretrain.errors import DataError, StoreError

__all__ = ["BuildOptions", "BuildProgress", "BuildReport", "build"]

_IN_PROCESS_BYTES = 2 * 2**20  # below, starting workers costs more than it gives
_LEAST_RANGES = 32  # tasks to share out also where there is little text
_LEAST_RANGE_BYTES = 2**20

OpenPool = Callable[[BuildOptions, int, int | None], AbstractContextManager[TaskPool]]
"""(options, expected bytes of text, descriptor of the output's lock) -> what runs the tasks."""


def local_pool(options: BuildOptions, expected_bytes: int, lock: int | None) -> AbstractContextManager[TaskPool]:
    """Processes on this machine, as many as the options say."""
    workers = num_workers(options, expected_bytes)
    return nullcontext(OwnProcess()) if workers == 1 else WorkerProcesses(workers, lock)


def num_workers(options: BuildOptions, expected_bytes: int) -> int:
    """Processes that a build on this machine takes."""
    if options.workers is not None:
        return options.workers
    kept = min(expected_bytes, options.max_bytes or expected_bytes)
    return 1 if kept < _IN_PROCESS_BYTES else len(os.sched_getaffinity(0))


def build(
    options: BuildOptions,
    progress: Callable[[BuildProgress], None] = lambda progress: None,
    *,
    notice: Callable[[str], None] = lambda text: None,
    open_pool: OpenPool = local_pool,
) -> BuildReport:
    """Builds all splits, going on where an unfinished build of the same inputs and options ended.

    Args:
        progress: hears where the build is.
        notice: hears what is kept of an unfinished build, and what had to start again and why.
        open_pool: what runs the tasks.

    Raises:
        DataError: wrong options, unreadable or unfit inputs, an output that exists, an empty corpus or split.
        StoreError: reading or writing failed.
        UserError: a package is missing.
    """
    tokenizer = Tokenizer.load(options.tokenizer)
    output = Output(options.out, work=options.work)
    files = list_files(options.source)
    plan = make_plan(options, files, tokenizer)
    teller = ProgressTeller(progress, len(files))
    try:
        with output:
            if output.committed:
                return _finished(output, plan, notice)
            with open_pool(options, plan.expected_bytes, output.fileno()) as pool:
                return _Build(plan, output, tokenizer, pool, teller, notice).run()
    except OSError as error:
        raise StoreError(
            f"cannot write {error.filename or options.out}: {error.strerror}. Free space or choose another --out."
        ) from error


def _finished(output: Output, plan: BuildPlan, notice: Callable[[str], None]) -> BuildReport:
    """The build was killed between publishing and cleaning up."""
    stored = json.loads(output.work.get(REPORT_KEY))
    output.clean()
    if stored["keys"] != plan.keys:
        raise DataError(f"out={output.out} exists. A source is never changed. Choose another --out or remove it.")
    notice(f"{output.out} was complete already; removed what its build had left")
    return BuildReport.restored(stored["report"])


class _Build:
    """One build under way."""

    def __init__(
        self,
        plan: BuildPlan,
        output: Output,
        tokenizer: Tokenizer,
        pool: TaskPool,
        teller: ProgressTeller,
        notice: Callable[[str], None],
    ) -> None:
        self._plan, self._options, self._output = plan, plan.options, output
        self._work = output.work
        self._tokenizer, self._teller, self._notice = tokenizer, teller, notice
        self._stages = StageRunner(output.work, output.final, pool)
        self._counts = ReadCounts()
        self._sums: dict[str, int] = {}

    def run(self) -> BuildReport:
        self._keep_or_restart()
        done_before = self._stages.is_done(self._plan.folder("encode"))
        reading = [] if done_before else self._read()
        encoded = self._encode(reading)
        parts = self._parts(encoded)
        plan = self._plan
        layout = LayoutStages(
            Layout(plan.headers, plan.folders, self._options.over_long, self._options.shard_blocks),
            {stage: plan.folder(stage) for stage in ("pack", "write")},
            self._stages,
            self._teller,
        )
        packed = layout.pack(parts) if plan.packed else {}
        for split in self._options.splits:
            if not parts[split].documents or (packed and not sum(table["rows"] for table in packed[split])):
                raise self._empty_split(split, packed.get(split, []))
        shards = layout.write(parts, packed)
        manifests = layout.manifests(shards, packed)
        report = self._report(manifests, encoded)
        self._work.put(REPORT_KEY, json.dumps({"keys": self._plan.keys, "report": report.stored()}).encode())
        self._publish(manifests)
        return report

    # ------------------------------------------------------------------------------------------- stages

    def _keep_or_restart(self) -> None:
        """Compares with the unfinished build that was left here, if any; removes what does not serve."""
        plan, work = self._plan, self._work
        folders = {plan.folder(stage) for stage in STAGES}
        if work.exists(BUILD_KEY):
            before = json.loads(work.get(BUILD_KEY))
            kept = [stage for stage in STAGES if work.names(plan.folder(stage))]
            differences = changes(before, plan.described)
            if differences:
                goes_on = f"keeps what it has done in {', '.join(kept)}" if kept else "starts from the beginning"
                self._notice(
                    f"an unfinished build was left with other inputs or options: {'; '.join(differences)}; {goes_on}"
                )
            elif kept:
                self._notice(f"goes on with an unfinished build: keeps what it has done in {', '.join(kept)}")
        for name in work.names():
            if name not in folders and name not in (BUILD_KEY, REPORT_KEY):
                drop_stage(work, name)
        work.delete(REPORT_KEY)
        work.put(BUILD_KEY, json.dumps(plan.described).encode())

    def _read(self) -> list[dict[str, Any]]:
        options, plan = self._options, self._plan
        self._teller.phase("read", plan.expected_bytes)

        def items() -> list[dict[str, Any]]:
            return [{"files": [[number, *plan.files[number]] for number in piece]} for piece in plan.pieces]

        def common() -> dict[str, Any]:
            return {
                "spec": plan.described["source"],
                "seed": options.seed,
                "deduplicate": options.deduplicate,
                "validation_fraction": options.validation_fraction,
                "max_bytes": options.max_bytes,
                "run_bytes": self._budget(RUN_BYTES),
            }

        try:
            results = self._stages.run(
                "read",
                plan.folder("read"),
                common,
                items,
                self._teller.tick,
                lambda one: self._teller.reuse(one["read_bytes"], 0),
            )
            for result in results:
                self._counts.add(result["counts"])
            check_fields_seen(options.source, self._counts)
            if not any(result["runs"] for result in results):
                raise nothing_to_build(options.source, options.max_bytes)
        except DataError:
            self._output.discard()
            raise
        return results

    def _encode(self, reading: list[dict[str, Any]]) -> list[dict[str, Any]]:
        plan, work = self._plan, self._work
        folder = plan.folder("encode")
        runs = [Run(*run) for result in reading for run in result["runs"]]
        expected = sum(one["kept_bytes"] - one["duplicate_bytes"] for one in reading)
        if self._options.max_bytes is not None:
            expected = min(expected, self._options.max_bytes)
        self._teller.phase("encode", expected or None)

        def items() -> list[dict[str, Any]]:
            sizes = slot_sizes(work, runs)
            enough = max(int(sizes.sum()) // _LEAST_RANGES, _LEAST_RANGE_BYTES)
            return [
                {"low": low, "high": high} for low, high in ranges_of(sizes, min(enough, self._budget(RANGE_BYTES)))
            ]

        def common() -> dict[str, Any]:
            work.put(f"{folder}/{TOKENIZER}", self._tokenizer.to_bytes())
            names = [os.fsencode(file.origin).decode("utf-8", "backslashreplace") for file in plan.files]
            return {
                "runs": [[run.key, run.bytes] for run in runs],
                "files": names,
                "deduplicate": self._options.deduplicate,
                "limit": self._limit(reading),
                "pairs": self._options.source.pairs,
                "masked": self._options.source.trained is not None,
                "dtype": "<" + plan.headers["train"].dtype,
                "range_bytes": self._budget(RANGE_BYTES),
                "reading": _summed(reading) | {"counts": self._counts.to_json()},
            }

        results = self._stages.run(
            "encode", folder, common, items, self._teller.tick, lambda one: self._teller.reuse(one["text_bytes"], 0)
        )
        reading_sums = json.loads(work.get(f"{folder}/common.json"))["reading"]
        self._counts = ReadCounts()
        self._counts.add(reading_sums.pop("counts"))
        self._sums = reading_sums
        drop_stage(work, plan.folder("read"))
        self._teller.complete()
        return results

    def _limit(self, reading: list[dict[str, Any]]) -> str | None:
        """The selection's limit as hex: what all pieces kept must fit, and no piece kept more than below its own."""
        if self._options.max_bytes is None:
            return None
        selection = Selection(self._options.max_bytes)
        for number in range(len(reading)):
            kept = self._work.get(f"{self._plan.folder('read')}/{number:06d}.kept")
            count = len(kept) // (DIGEST_BYTES + 8)
            sizes = np.frombuffer(kept, dtype="<i8", offset=count * DIGEST_BYTES).tolist()
            selection.merge(kept[: count * DIGEST_BYTES], sizes)
        limits = [one["limit"] for one in reading if one["limit"] is not None]
        if selection.limit is not None:
            limits.append(selection.limit.hex())
        return min(limits, default=None)

    def _parts(self, encoded: list[dict[str, Any]]) -> dict[str, PartList]:
        def of(split: str) -> list[PartInfo]:
            return number_parts(tuple(part) for result in encoded for part in result["parts"][split])

        return {split: PartList(of(split)) for split in self._options.splits}

    def _budget(self, usual_bytes: int) -> int:
        """Bytes of text that a process may hold at once."""
        if self._options.memory_bytes is None:
            return usual_bytes
        # A run or range is in memory as records, parsed, decoded and as ids: about eight times its bytes.
        share = self._options.memory_bytes // (8 * num_workers(self._options, self._plan.expected_bytes))
        return min(usual_bytes, max(share, 2**16))

    # ------------------------------------------------------------------------------------------- the end

    def _publish(self, manifests: dict[str, Manifest]) -> None:
        """The manifests last; of two splits, training is the last of all."""
        publish(self._output.final, self._plan.folders, manifests)
        self._output.commit()

    def _report(self, manifests: dict[str, Manifest], encoded: list[dict[str, Any]]) -> BuildReport:
        counts, sums = self._counts, self._sums
        lengths: dict[str, dict[str, int]] = {}
        for result in encoded:
            merge_histograms(lengths, result["lengths"])
        found = sum(result["documents"] for result in encoded)
        selected = sum(part[1] for result in encoded for parts in result["parts"].values() for part in parts)
        splits = self._options.splits
        return BuildReport(
            sources={
                split: (f"{self._output.out}/{split}" if len(splits) > 1 else self._output.out, manifests[split])
                for split in splits
            },
            files=counts.files,
            documents_read=counts.documents,
            read_bytes=sums["read_bytes"],
            empty=counts.empty,
            invalid=counts.invalid,
            invalid_examples=tuple(counts.invalid_examples),
            repaired=counts.repaired,
            other_members=counts.other_members,
            duplicates=counts.documents - sums["not_selected"] - found,
            not_selected=sums["not_selected"] + found - selected,
            too_long=sum(manifest.dropped for manifest in manifests.values()),
            shortened=sum(manifest.shortened for manifest in manifests.values()),
            lengths=lengths,
            tasks=self._stages.tasks,
            reused_tasks=self._stages.reused,
            seconds=self._teller.elapsed_s,
            encoded_bytes=self._teller.session_bytes("encode"),
        )

    def _empty_split(self, split: str, packed: list[dict[str, Any]]) -> DataError:
        options = self._options
        dropped = sum(table["dropped"] for table in packed)
        if dropped:
            return over_long_error(self._plan.headers[split], packed)
        self._output.discard()
        return DataError(
            f"validation_fraction={options.validation_fraction:g} leaves no document for {split} (documents read: "
            f"{self._counts.documents}). Both parts need at least one. Change --validation-fraction or give more text."
        )


def _summed(reading: list[dict[str, Any]]) -> dict[str, int]:
    names = ("read_bytes", "kept_bytes", "not_selected", "duplicate_bytes")
    return {name: sum(result[name] for result in reading) for name in names}
