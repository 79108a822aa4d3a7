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
    """Shows `encode 12.3/24.0 MB, 5.1 MB/s, 1.4 Mtok/s, 0:02 left`: in place on a terminal, now and then elsewhere."""
    live = sys.stderr.isatty()
    interval = _PROGRESS_EVERY_S if live else _PLAIN_PROGRESS_EVERY_S
    phase, shown = "", time.monotonic()

    def show(progress: BuildProgress) -> None:
        nonlocal phase, shown
        now = time.monotonic()
        if not phase:
            sys.stderr.write(f"reading {progress.files:,} file{'s' if progress.files != 1 else ''}\n")
        phase = progress.phase
        complete = progress.done_bytes == progress.total_bytes
        if now - shown < interval and not complete:
            return
        shown = now
        text = describe_progress(progress)
        sys.stderr.write(f"\r{text:<70}" + ("\n" if complete else "") if live else text + "\n")
        sys.stderr.flush()

    return show


def describe_progress(progress: BuildProgress) -> str:
    """One line: how much is done, how fast, and how long this phase will take."""
    seconds = max(progress.elapsed_s - progress.phase_started_s, 1e-3)
    total = "" if progress.total_bytes is None else f"/{progress.total_bytes / 1e6:,.1f}"
    parts = []
    if progress.done_bytes:
        parts += [f"{progress.done_bytes / 1e6:,.1f}{total} MB", f"{progress.session_bytes / 1e6 / seconds:,.1f} MB/s"]
    if progress.session_tokens:
        parts.append(f"{progress.session_tokens / 1e6 / seconds:,.2f} Mtok/s")
    left = progress.seconds_left
    if left is not None and left >= 0.5:
        minutes, rest = divmod(round(left), 60)
        parts.append(
            f"{minutes // 60}:{minutes % 60:02d}:{rest:02d} left" if minutes >= 60 else f"{minutes}:{rest:02d} left"
        )
    return f"{progress.phase} {', '.join(parts)}"


def describe_build(report: BuildReport) -> str:
    """Where the sources are, what was left out and why, how fast it went."""
    lines = []
    for split, (path, manifest) in report.sources.items():
        tokens = manifest.tokens + manifest.source_tokens
        lines.append(
            f"{split}: {path}: {manifest.documents:,} documents, {manifest.text_bytes / 1e6:,.1f} MB -> "
            f"{tokens:,} tokens, {manifest.blocks:,} blocks in {len(manifest.shards):,} shards"
        )
        lines.append(
            f"  {manifest.text_bytes / max(tokens, 1):.2f} bytes per token, "
            f"{100 * manifest.fill_fraction:.1f} % of the slots filled"
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
    if report.shortened:
        lines.append(f"{report.shortened:,} documents were longer than a row and lost their end")
    if report.repaired:
        lines.append(f"{report.repaired:,} texts had lone surrogates, now U+FFFD")
    if report.other_members:
        lines.append(f"{report.other_members:,} members of tars are neither text nor JSON, left out")
    lines += [f"  not UTF-8: {example}" for example in report.invalid_examples]
    seconds = max(report.seconds, 1e-3)
    lines.append(f"{report.encoded_bytes / 1e6 / seconds:,.1f} MB/s, {report.seconds:,.1f} s")
    if report.reused_tasks:
        lines.append(f"{report.reused_tasks:,} of {report.tasks:,} tasks had been done before")
    return "\n".join(lines)


def plot_build(report: BuildReport, out: str) -> str:
    """Draws the lengths of all documents into OUT/lengths.png -> its path."""
    from pretrain.data.length_plot import draw_lengths
    from pretrain.store import open_store

    store = open_store(out)
    name = next(iter(report.sources.values()))[1].name
    store.put("lengths.png", draw_lengths(name, report.lengths))
    return f"{store.url}/lengths.png"
