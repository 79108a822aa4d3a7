"""`pretrain data plan|mix`: what a run will read, before it does."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from launch.commands.arguments import positive
from launch.outputs import write_output
from launch.tables import format_table
from pretrain.errors import ExitCode

if TYPE_CHECKING:
    from pretrain.config import RunConfig
    from pretrain.data.rows import SourceRows
    from pretrain.data.state import DataState

_BAR = 50
_MARKS = "#=+-.:*%@ox"


def register_forecasts(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = actions.add_parser(
        "plan",
        help="show what a run will read: epochs, tokens, reads per rank",
        description="Opens the sources of a config and counts what the run takes from each, without reading text.",
    )
    _add_config(plan)
    plan.add_argument(
        "--ranks", type=positive, metavar="R", help="ranks that share the reading (default: the config's)"
    )
    plan.set_defaults(handler="launch.commands.data_forecast:plan")
    mix = actions.add_parser(
        "mix",
        help="plot the shares of the sources over a run",
        description="Counts the rows of each source in equal parts of the run: stages, caps and skips included.",
    )
    _add_config(mix)
    mix.add_argument("--parts", type=positive, default=20, metavar="N", help="parts of the run (default 20)")
    mix.add_argument("--plot", metavar="FILE", help="write the shares as a picture (PNG)")
    mix.set_defaults(handler="launch.commands.data_forecast:mix")


def plan(args: argparse.Namespace) -> int:
    """Prints the pipeline as a tree and a table of the sources."""
    from pretrain.data.describe import describe_pipeline
    from pretrain.data.forecast import forecast

    with _opened(args) as (config, sources, state):
        ranks = args.ranks or config.cluster.num_ranks
        found = forecast(config, sources, state, ranks=ranks)
        tree = describe_pipeline(config, sources, state)
    if args.json:
        print(json.dumps({**found.to_json(), "ranks": ranks}, indent=2))
        return ExitCode.DONE
    print(tree)
    header = ["source", "share %", "rows", "epochs", "tokens", "block reads per rank", "MB per rank"]
    rows = [
        [s.name, 100 * s.share, s.rows, s.epochs, s.tokens, s.block_reads, s.read_bytes / 1e6] for s in found.sources
    ]
    print(format_table(header, rows))
    scaled = "" if found.counted_rows >= found.rows else f" (counted over the first {found.counted_rows:,} rows)"
    fewest = ranks if args.ranks else min(config.cluster.min_ranks or ranks, ranks)
    for line in _idle(state, range(fewest, ranks + 1)):
        print(line)
    print(f"{found.steps:,} steps, {found.rows:,} rows, {found.tokens:,} token slots on {ranks} ranks{scaled}")
    return ExitCode.DONE


def _idle(state: DataState, ranks: range) -> Iterator[str]:
    """A line for each segment whose micro-batches do not fill the last round on some number of ranks."""
    from pretrain.data.forecast import idle_fraction, step_of_row

    for segment in state.segments:
        empty = {number: idle_fraction(segment, number) for number in ranks}
        if any(empty.values()):
            shares = ", ".join(f"{100 * share:.0f} % on {number} ranks" for number, share in empty.items())
            micro_batches = segment.global_batch_size // segment.micro_batch_size
            step = step_of_row(state, segment.first_row)
            yield f"from step {step:,}: {micro_batches} micro-batches; empty ones fill {shares}"


def mix(args: argparse.Namespace) -> int:
    """Prints a bar of the shares for each part of the run."""
    from pretrain.data.forecast import shares

    with _opened(args) as (config, _, state):
        parts = shares(state, config.schedule.total_steps, args.parts)
    if args.plot:
        from pretrain.data.share_plot import draw_shares

        write_output("--plot", args.plot, draw_shares(config.name, parts))
    if args.json:
        print(json.dumps([{"first_step": first, "end_step": end, "shares": of} for first, end, of in parts], indent=2))
        return ExitCode.DONE
    names = list(parts[0][2])
    print("   ".join(f"{_MARKS[number % len(_MARKS)]} {name}" for number, name in enumerate(names)))
    rows = [
        [f"{first}-{end - 1}", _bar([of[name] for name in names]), *(100 * of[name] for name in names)]
        for first, end, of in parts
    ]
    print(format_table(["steps", "shares", *(f"{name} %" for name in names)], rows))
    return ExitCode.DONE


def _bar(of_sources: Sequence[float]) -> str:
    """One line of `_BAR` marks; the edges are rounded, so that the bar is always full."""
    bar, total = "", 0.0
    for number, share in enumerate(of_sources):
        total += share
        bar += _MARKS[number % len(_MARKS)] * (round(total * _BAR) - len(bar))
    return bar


@contextlib.contextmanager
def _opened(args: argparse.Namespace) -> Iterator[tuple[RunConfig, tuple[SourceRows, ...], DataState]]:
    """The config, its sources and the state of its run before the first step."""
    from pretrain.config import load_config
    from pretrain.data.rows import open_sources
    from pretrain.data.stages import plan_of, plan_run
    from pretrain.data.state import DataState

    config = load_config(args.config, args.overrides)
    sources = tuple(open_sources(config, "sources").values())
    yield config, sources, plan_run(plan_of(config, sources), DataState(next_row=0, seed=config.seed, segments=()))


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="config file (.yaml)")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="changes to the config")
    parser.add_argument("--json", action="store_true", help="print JSON")
