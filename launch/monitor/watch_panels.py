"""How a run stands, as text: the first page of `pretrain watch`, panel by panel. PURE, but for what a reader reads.

Takes the facts that the run's page in a browser is made of (`run_facts`) -> panels in its order. What happened so far
is in `watch_history`. A line is at most `width` characters long.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from launch.monitor.facts import sample_facts
from launch.monitor.reader import RunReader
from launch.monitor.report import exact_seconds, format_bar
from launch.tables import format_table
from pretrain.errors import StoreError
from pretrain.metrics.progress import format_count, format_duration

_BLOCKS = "▁▂▃▄▅▆▇█"
_STALE_S = 60.0
_IS_PART = re.compile(r"share$|fraction$")
_MOST_ROWS = 12  # of tables that grow with the run
_CURVES = (("loss", "loss"), ("speed", "tokens_per_second"), ("gradient", "gradient_norm"), ("rate", "learning_rate"))
Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Panel:
    """A heading and its lines.

    Attributes:
        tone: "", "warn" or "bad".
        wraps: lines that are too long go on below themselves; else they end at the edge, as rows of tables do.
        hang: where they go on.
    """

    title: str
    lines: list[str]
    tone: str = ""
    wraps: bool = True
    hang: int = 11

    def fitting(self, width: int) -> Panel:
        """The same with lines of at most `width` characters; of texts of several lines the first counts."""
        firsts = [line.partition("\n")[0] for line in self.lines]
        if self.wraps:
            indent = " " * min(self.hang, width // 2)
            wrapped = (textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) for line in firsts)
            fitted = [part for parts in wrapped for part in parts]
        else:
            fitted = [line if len(line) <= width else line[: max(0, width - 1)] + "…" for line in firsts]
        return replace(self, lines=fitted)


def run_panels(reader: RunReader, facts: Facts, width: int, now: float) -> list[Panel]:
    """How the run stands: all panels that have something to say."""
    panels = [
        Panel("", _state(facts, width, now), _tone(facts)),
        Panel("curves", _curves(reader, facts, width), wraps=False),
        Panel("a step", _step(facts)),
        Panel("time", _time(facts), wraps=False),
        Panel("health", _health(facts), "warn" if facts["warnings"] else ""),
        Panel("data", _sources(facts), wraps=False),
        Panel("objectives", _table(facts, "objectives", "objective", (("loss", "loss"),)), wraps=False),
        Panel("attention", _attention(facts), wraps=False),
        Panel("layers", _layers(facts), wraps=False),
        Panel("ranks", _ranks(facts)),
        Panel("checkpoints", _checkpoints(facts, now), wraps=False),
        Panel("what the model writes", _samples(reader, facts)),
    ]
    return [panel.fitting(width) for panel in panels if panel.lines]


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve in one line: the mean of each of `width` parts, from the lowest to the highest."""
    finite = [value for value in values if not math.isnan(value)]
    if not finite:
        return ""
    parts = min(width, len(finite))
    means = []
    for part in range(parts):
        chosen = finite[part * len(finite) // parts : (part + 1) * len(finite) // parts]
        means.append(sum(chosen) / len(chosen))
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
        least, kept = math.inf if attempt.kept_step is None else attempt.kept_step + 1, []
        # Backwards: what comes later and is an earlier step was computed again, by this attempt or another one.
        for step, value in zip(reversed(columns.fields["step"]), reversed(columns.fields[name]), strict=True):
            if step < least:
                least = step
                kept.append(value)
        values += kept[::-1]
    return values


def clock(t: float, now: float) -> str:
    """The time of day, with the date of another day than today."""
    moment = datetime.fromtimestamp(t)
    return moment.strftime("%H:%M:%S" if moment.date() == datetime.fromtimestamp(now).date() else "%b %d %H:%M:%S")


def _tone(facts: Facts) -> str:
    return {"failed": "bad", "damaged": "bad", "lost": "bad", "restarting": "warn"}.get(facts["status"]["state"], "")


def _state(facts: Facts, width: int, now: float) -> list[str]:
    status, values = facts["status"], facts["values"]
    total = status["total_steps"] or 0
    lines = [f"{status['name']}  ● {status['state']}  {_age(status['updated_at'], now, facts['living'])}".rstrip()]
    lines += [f"{'why':<11}{status['reason']}"] if status["reason"] else []
    if total:
        bar_width = max(10, min(40, width - 40))
        done = status["step"] / total
        left = f"  {format_duration(values['eta_s'])} left" if facts["living"] and values["eta_s"] is not None else ""
        bar = format_bar(done, bar_width).ljust(bar_width, "░")
        lines.append(f"{'step':<11}{status['step']}/{total}  {bar}  {100 * done:.0f} %{left}")
    if values["tokens"] is not None:
        lines.append(f"{'tokens':<11}{format_count(values['tokens'])} seen")
    for source, row in facts["validation"].items():
        known = [f"{word} {row[name]:.4f}" for name, word in _VALIDATED if isinstance(row.get(name), int | float)]
        lines.append(f"{'validation':<11}{source} at step {row['step']}: {', '.join(known)}")
    return lines


_VALIDATED = (("loss", "loss"), ("bits_per_byte", "bits/byte"), ("bleu", "BLEU"), ("chrf", "chrF"))


def _curves(reader: RunReader, facts: Facts, width: int) -> list[str]:
    status, values = facts["status"], facts["values"]
    now = {
        "loss": None if status["loss"] is None else f"{status['loss']:.4f}",
        "speed": None
        if status["tokens_per_second"] is None
        else f"{format_count(status['tokens_per_second'])} tokens/s",
        "gradient": None if values["gradient_norm"] is None else f"norm {values['gradient_norm']:.3g}",
        "rate": None if values["learning_rate"] is None else f"{values['learning_rate']:.3g}",
    }
    lines = []
    for word, field in _CURVES:
        if now[word] is not None:
            label = f"{word:<11}{now[word]:<17}"
            lines.append(label + sparkline(kept_values(reader, field), max(0, width - len(label))))
    return lines


def _step(facts: Facts) -> list[str]:
    values, lines = facts["values"], []
    parts = [("data wait", "data_wait_s"), ("forward", "forward_s"), ("backward", "backward_s")]
    split = [(word, values[name]) for word, name in [*parts, ("optimizer", "optimizer_s")] if values[name] is not None]
    if values["step_s"] is not None:
        spent = ", ".join(f"{word} {exact_seconds(seconds)}" for word, seconds in split)
        lines.append(f"{'time':<11}{exact_seconds(values['step_s'])}{': ' if spent else ''}{spent}")
    if values["mfu"] is not None:
        hfu = f", HFU {100 * values['hfu']:.1f} %" if values["hfu"] is not None else ""
        peak = f" of {_flops(values['peak_flops'])} a rank" if values["peak_flops"] else ""
        lines.append(f"{'MFU':<11}{100 * values['mfu']:.1f} %{hfu}{peak}")
    if values["largest_expert_share"] is not None:
        share, idle = 100 * values["largest_expert_share"], values["idle_experts"]
        lines.append(f"{'experts':<11}fullest {share:.1f} %, without a token {idle}")
    if values["balance_loss"] is not None:
        losses = f"balance loss {values['balance_loss']:.3f}, z loss {values['router_z_loss']:.3g}"
        lines.append(f"{'routers':<11}{losses}")
    named = (("host", "host_bytes"), ("allocated", "allocated_bytes"), ("reserved", "reserved_bytes"))
    memory = [f"{word} {_bytes(values[name])}" for word, name in named if values[name] is not None]
    return [*lines, f"{'memory':<11}{', '.join(memory)}"] if memory else lines


def _time(facts: Facts) -> list[str]:
    ledger = facts["ledger"]
    wall_s = ledger["wall_s"]
    if not wall_s:
        return []
    lines = [f"{'in all':<17}{format_duration(wall_s):>9}   goodput {100 * ledger['goodput']:.1f} %"]
    for kind, seconds in sorted(ledger["seconds"].items(), key=lambda entry: -entry[1]):
        if seconds >= 0.005:
            share = seconds / wall_s
            lines.append(f"{kind:<17}{exact_seconds(seconds):>9}  {100 * share:5.1f} %  {format_bar(share)}".rstrip())
    return lines


def _health(facts: Facts) -> list[str]:
    values = facts["values"]
    named = (
        ("skipped steps", "skipped_steps"),
        ("rollbacks", "rollbacks"),
        ("rows masked in the last step", "masked_rows"),
    )
    bad = [f"{word} {values[name]:.0f}" for word, name in named if values[name]]
    lines = [f"{'steps':<11}{', '.join(bad) or 'none skipped, no rollback, no row masked'}"]
    lines += [f"{'warning':<11}{word}" for word in facts["warnings"][:_MOST_ROWS]]
    more = len(facts["warnings"]) - _MOST_ROWS
    return [*lines, f"{'':<11}and {more} more"] if more > 0 else lines


def _sources(facts: Facts) -> list[str]:
    columns = (("share", "share of rows"), ("planned_share", "planned"), ("epochs", "epochs"), ("loss", "loss"))
    return _table(facts, "sources", "source", columns)


def _attention(facts: Facts) -> list[str]:
    columns = (
        ("entropy_fraction", "entropy/uniform"),
        ("lowest_entropy_fraction", "least"),
        ("highest_entropy_fraction", "most"),
        ("largest_score", "largest score"),
        ("top_share", "most fixed head"),
    )
    return _table(facts, "attention", "layer", columns)


def _layers(facts: Facts) -> list[str]:
    columns = (("parameter_norm", "weights"), ("update_norm", "update"), ("activation_rms", "activations"))
    return _table(facts, "layers", "norms of layer", columns)


def _table(facts: Facts, table: str, word: str, columns: Sequence[tuple[str, str]]) -> list[str]:
    """Rows of a table of the newest record; shares and fractions as percentages, like the page's."""
    rows = facts["tables"].get(table)
    if not rows:
        return []
    cells = [
        [name, *(_percent(row.get(field)) if _IS_PART.search(field) else row.get(field) for field, _ in columns)]
        for name, row in rows.items()
    ]
    return format_table([word, *(head for _, head in columns)], cells).splitlines()


def _ranks(facts: Facts) -> list[str]:
    heat = facts["heat"]
    if not heat["steps"] or len(heat["ratio"][-1]) < 2:
        return []
    slow = sorted(enumerate(heat["ratio"][-1]), key=lambda entry: -entry[1])[:3]
    words = [f"rank {rank} (x {ratio:.3g}, {exact_seconds(heat['own_s'][rank])} a step)" for rank, ratio in slow]
    return [f"{len(heat['ratio'][-1])} ranks, own work over the median; slowest now: {', '.join(words)}"]


def _checkpoints(facts: Facts, now: float) -> list[str]:
    copy, saved = facts["values"]["memory_copy_step"], facts["checkpoints"]
    lines = [f"newest copy in memory: step {copy:.0f}"] if copy is not None else []
    if not saved:
        return lines
    rows = [
        [
            each["checkpoint"],
            f"{format_duration(now - each['t'])} ago",
            _bytes(each["bytes"]) if each.get("bytes") else None,
            each["tier"],
            _seconds(each.get("stall_s")),
            _seconds(each.get("write_s")),
            each["verified"],
        ]
        for each in reversed(saved[-_MOST_ROWS:])
    ]
    head = ["checkpoint", "age", "size", "tier", "stall", "written in", "verified"]
    return [*lines, *format_table(head, rows).splitlines()]


def _samples(reader: RunReader, facts: Facts, most: int = 3) -> list[str]:
    if not facts["samples"]:
        return []
    key = facts["samples"][-1]
    try:
        samples = sample_facts(reader.run.store, key)["samples"][:most]
    except StoreError:
        return []
    step, kind = int(key.removesuffix(".jsonl").rpartition("-")[2]), "prompts" if "prompts" in key else "held-out pairs"
    lines = [f"step {step}, {kind}"]
    for sample in samples:
        lines += [f"{name:<11}{' '.join(str(text).split())}" for name, text in sample.items()]
    return lines


def _seconds(seconds: float | None) -> str | None:
    return exact_seconds(seconds) if seconds else None


def _bytes(value: float) -> str:
    return format_count(value).replace("B", "G") + "B"


def _flops(value: float) -> str:
    return f"{value / 1e12:.3g} TFLOP/s" if value >= 1e12 else f"{value / 1e9:.3g} GFLOP/s"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:5.1f} %"


def _age(t: float | None, now: float, living: bool) -> str:
    if t is None:
        return ""
    ago = format_duration(now - t)
    if not living:
        return f"ended {ago} ago"
    return f"last sign of life {ago} ago" if now - t >= _STALE_S else clock(t, now)
