"""`pretrain watch RUN`: how a run stands, refreshed in place on a terminal; a line per news elsewhere.

Takes a `RunReader` → lines. Only reads the run's directory. On a terminal the picture is drawn on the
alternate screen, which is put back at the end, and the last picture stays below.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import time
from collections.abc import Sequence
from datetime import datetime

from launch.monitor.ledger import Kind
from launch.monitor.reader import RunReader
from launch.monitor.report import exact_seconds, format_bar, last_validations
from pretrain.errors import ExitCode
from pretrain.metrics.progress import format_count, format_duration
from pretrain.rundir import RunDirectory

_BLOCKS = "▁▂▃▄▅▆▇█"
_COLOURS = {"running": 32, "completed": 32, "restarting": 33, "created": 33, "failed": 31, "lost": 31, "damaged": 31}
_STALE_S = 60.0


def run_watch(args: argparse.Namespace) -> int:
    """Handler of `pretrain watch`: until the run has ended, or Ctrl-C."""
    reader = RunReader(RunDirectory.locate(args.run))
    try:
        if args.once:
            reader.refresh()
            print("\n".join(render(reader, _width(), time.time(), colour=sys.stdout.isatty())))
        elif sys.stdout.isatty():
            _draw_in_place(reader, args.every)
        else:
            _print_news(reader, args.every)
    except KeyboardInterrupt:  # the way to leave a picture that people look at
        pass
    return int(ExitCode.DONE)


def render(reader: RunReader, width: int, now: float, *, colour: bool) -> list[str]:
    """The picture: at most `width` characters in a line, colours not counted."""
    status = reader.status
    paint = _Paint(colour)
    mark = paint(_COLOURS.get(status.state, 36), f"● {status.state}")
    lines = [f"{paint(1, status.name)}  {mark}  {_age(status.updated_at, now, reader.living)}", ""]
    if status.reason:
        lines[1] = paint(31 if status.state in ("failed", "damaged") else 33, _cut(status.reason, width))
    lines += _progress_lines(reader, width)
    lines += ["", *_time_lines(reader, width, paint)]
    lines += ["", *_attempt_lines(reader, width, paint)]
    return lines


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve in one line: the mean of each of `width` parts, from the lowest to the highest."""
    finite = [value for value in values if not math.isnan(value)]
    if not finite:
        return ""
    width = min(width, len(finite))
    means = []
    for part in range(width):
        chunk = finite[part * len(finite) // width : (part + 1) * len(finite) // width]
        means.append(sum(chunk) / len(chunk))
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)


def kept_values(reader: RunReader, name: str) -> list[float]:
    """A field of the step records that are part of the run, in order of steps."""
    values: list[float] = []
    for attempt in reader.attempts():
        columns = reader.columns.get(attempt.number)
        if columns is None or name not in columns.fields:
            continue
        pairs = zip(columns.fields["step"], columns.fields[name], strict=True)
        values += [value for step, value in pairs if attempt.kept_step is None or step <= attempt.kept_step]
    return values


def _progress_lines(reader: RunReader, width: int) -> list[str]:
    status = reader.status
    total = status.total_steps or 0
    lines = []
    if total:
        bar_width = max(10, min(40, width - 40))
        bar = format_bar(status.step / total, bar_width).ljust(bar_width, "░")
        left = reader.last_value("eta_s") if reader.living else None
        eta = f"  {format_duration(left)} left" if left is not None else ""
        lines.append(f"{'step':<11}{status.step}/{total}  {bar}  {100 * status.step / total:.0f} %{eta}")
    if status.loss is not None:
        label = f"{'loss':<11}{status.loss:.4f}  "
        lines.append(label + sparkline(kept_values(reader, "loss"), width - len(label)))
    for source, values in last_validations(reader).items():
        loss, bits = values.get("loss"), values.get("bits_per_byte")
        shown = [] if loss is None else [f"loss {loss:.4f}"]
        shown += [] if bits is None else [f"{bits:.4f} bits/byte"]
        lines.append(_cut(f"{'validation':<11}{source} at step {values['step']}: {', '.join(shown)}", width))
    if status.tokens_per_second is not None:
        label = f"{'speed':<11}{format_count(status.tokens_per_second)} tokens/s"
        mfu = reader.last_value("mfu")
        label += f", mfu {100 * mfu:.0f} %  " if mfu is not None else "  "
        lines.append(label + sparkline(kept_values(reader, "tokens_per_second"), max(0, width - len(label))))
    norm, rate = reader.last_value("gradient_norm"), reader.last_value("learning_rate")
    if norm is not None and rate is not None:
        lines.append(f"{'gradient':<11}norm {norm:.3g}, learning rate {rate:.3g}")
    return lines


def _time_lines(reader: RunReader, width: int, paint: _Paint) -> list[str]:
    ledger = reader.ledger()
    if ledger.goodput is None:
        return [f"{'time':<11}-"]
    lines = [f"{'time':<11}{format_duration(ledger.wall_s)}, goodput {100 * ledger.goodput:.1f} %"]
    spent = sorted(((ledger.seconds.get(kind, 0.0), kind) for kind in Kind), reverse=True)
    parts = [f"{kind} {exact_seconds(seconds)}" for seconds, kind in spent if seconds >= 0.005]
    return [*lines, paint(2, _cut(f"{'':<11}{', '.join(parts)}", width))]


def _attempt_lines(reader: RunReader, width: int, paint: _Paint) -> list[str]:
    attempts = reader.attempts()
    lines = []
    if attempts:
        last = attempts[-1]
        where = f" on {last.host}" if last.host else ""
        lines.append(f"{'attempt':<11}{last.number}: {last.ranks} ranks{where}, from step {last.restored_step}")
    committed = [event for event in reader.events if event.kind == "committed"]
    if committed:
        names = [f"{event.fields.get('checkpoint')} {_clock(event.t)}" for event in reversed(committed[-3:])]
        lines.append(_cut(f"{'saved':<11}{', '.join(names)}", width))
    for event in [event for event in reader.events if event.kind == "fault"][-3:]:
        message = str(event.fields.get("message") or event.fields.get("cause") or "").splitlines()
        lines.append(paint(31, _cut(f"{'fault':<11}{_clock(event.t)} {message[0] if message else ''}", width)))
    return lines


class _Paint:
    """Puts an SGR code around a text, or leaves it alone."""

    def __init__(self, on: bool) -> None:
        self._on = on

    def __call__(self, code: int, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._on and text else text


def _draw_in_place(reader: RunReader, every_s: float) -> None:
    out = sys.stdout
    out.write("\x1b[?1049h\x1b[?25l")
    lines: list[str] = []
    try:
        while True:
            reader.refresh()
            size = shutil.get_terminal_size()
            lines = render(reader, size.columns, time.time(), colour=True)
            shown = [*lines[: size.lines - 2], "", "\x1b[2mCtrl-C leaves; the run goes on\x1b[0m"]
            out.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in shown[: size.lines - 1]) + "\x1b[J")
            out.flush()
            if not reader.living:
                return
            time.sleep(every_s)
    finally:
        out.write("\x1b[?25h\x1b[?1049l" + "\n".join(lines) + "\n")
        out.flush()


def _print_news(reader: RunReader, every_s: float) -> None:
    """One line for each new event and step, for files and pipes."""
    told, shown = 0, None
    while True:
        reader.refresh()
        for event in reader.events[told:]:
            fields = " ".join(f"{name}={value}" for name, value in event.fields.items() if name in _TOLD)
            print(f"{_clock(event.t)} {event.kind} {fields}".rstrip(), flush=True)
        told = len(reader.events)
        status = reader.status
        if status.loss is not None and (status.attempt, status.step) != shown:
            shown = (status.attempt, status.step)
            speed = format_count(status.tokens_per_second or 0.0)
            print(f"step {status.step}/{status.total_steps}  loss {status.loss:.4f}  {speed} tokens/s", flush=True)
        if not reader.living:
            print(f"{status.name} is {status.state} at step {status.step}", flush=True)
            return
        time.sleep(every_s)


_TOLD = ("attempt", "ranks", "why", "step", "checkpoint", "cause", "rank", "message", "outcome", "reason")


def _width() -> int:
    return shutil.get_terminal_size((100, 40)).columns


def _cut(text: str, width: int) -> str:
    line = text.splitlines()[0] if text else ""
    return line if len(line) <= width else line[: max(0, width - 1)] + "…"


def _clock(t: float) -> str:
    return datetime.fromtimestamp(t).strftime("%H:%M:%S")


def _age(t: float | None, now: float, living: bool) -> str:
    if t is None:
        return ""
    ago = format_duration(now - t)
    if not living:
        return f"ended {ago} ago"
    return f"last sign of life {ago} ago" if now - t >= _STALE_S else _clock(t)
