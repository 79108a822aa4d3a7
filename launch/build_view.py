"""What a person sees of `pretrain data build`: progress while it runs, the result after it."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pretrain.data.build import BuildProgress, BuildReport

_PROGRESS_EVERY_S = 0.5
_PLAIN_PROGRESS_EVERY_S = 10.0


def progress_line() -> Callable[[BuildProgress], None]:
    """Shows `encode 12.3/24.0 MB, 5.1 MB/s`: in place on a terminal, a line now and then elsewhere."""
    live = sys.stderr.isatty()
    interval = _PROGRESS_EVERY_S if live else _PLAIN_PROGRESS_EVERY_S
    phase, phase_started, shown = "", 0.0, time.monotonic()

    def show(progress: BuildProgress) -> None:
        nonlocal phase, phase_started, shown
        now = time.monotonic()
        if not phase:
            sys.stderr.write(f"reading {progress.files:,} file{'s' if progress.files != 1 else ''}\n")
        if progress.phase != phase:
            phase, phase_started = progress.phase, now
        complete = progress.done_bytes == progress.total_bytes
        if now - shown < interval and not complete:
            return
        shown = now
        done, speed = progress.done_bytes / 1e6, progress.done_bytes / 1e6 / max(now - phase_started, 1e-3)
        total = "" if progress.total_bytes is None else f"/{progress.total_bytes / 1e6:,.1f}"
        text = f"{phase} {done:,.1f}{total} MB, {speed:,.1f} MB/s"
        sys.stderr.write(f"\r{text:<60}" + ("\n" if complete else "") if live else text + "\n")
        sys.stderr.flush()

    return show


def describe_build(report: BuildReport) -> str:
    """Where the sources are, what was left out and why, how fast it went."""
    lines = []
    for split, (path, manifest) in report.sources.items():
        tokens = manifest.tokens + manifest.source_tokens
        lines.append(
            f"{split}: {path}: {manifest.documents:,} documents, {manifest.text_bytes / 1e6:,.1f} MB -> "
            f"{tokens:,} tokens, {manifest.blocks:,} blocks in {len(manifest.shards):,} shards"
        )
    left_out = {
        "empty": report.empty,
        "not UTF-8": report.invalid,
        "duplicates": report.duplicates,
        "beyond max_bytes": report.not_selected,
        "longer than a row": report.too_long,
    }
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items() if count)
    lines.append(f"read {report.documents_read + report.empty:,} documents of {report.files:,} files; "
                 f"left out: {reasons or 'none'}")  # fmt: skip
    if report.repaired:
        lines.append(f"{report.repaired:,} texts had lone surrogates, now U+FFFD")
    if report.other_members:
        lines.append(f"{report.other_members:,} members of tars are neither text nor JSON, left out")
    lines += [f"  not UTF-8: {example}" for example in report.invalid_examples]
    lines.append(f"{report.read_bytes / 1e6 / max(report.seconds, 1e-3):,.1f} MB/s, {report.seconds:,.1f} s")
    return "\n".join(lines)
