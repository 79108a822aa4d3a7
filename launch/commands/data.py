"""`pretrain data build|verify|reindex|stats|explain|plan|mix`: raw text to shards, and what shards hold."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from launch.commands import data_build, data_repack
from launch.commands.arguments import positive
from launch.commands.data_forecast import register_forecasts
from pretrain.errors import ExitCode, UserError

if TYPE_CHECKING:
    from pretrain.config import RunConfig
    from pretrain.data.state import DataState

EXPLAIN_DESCRIPTION = """\
Shows where the rows of a run come from: source, shard, block, documents and their text.

  pretrain data explain RUN --step 1200          the rows of that optimizer step
  pretrain data explain config.yaml --row 4711   one row, before any training"""

_SHOWN_PROBLEMS = 20


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "data", help="build shards from text, verify and explain them", description="Makes and inspects data sources."
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    data_build.register(actions)
    data_repack.register(actions)
    verify = actions.add_parser(
        "verify",
        help="read and check every byte of built sources",
        description="Checks sizes, hashes, tar headers, token ids, document ends and sums, shards side by side. "
        "Exit code 2 if a source is damaged.",
    )
    verify.add_argument("source", metavar="SOURCE", nargs="+", help="directory or URL with manifest.json")
    verify.add_argument("--threads", type=positive, metavar="N",
                        help="shards that are checked and held in memory at a time (default: one per CPU)")  # fmt: skip
    verify.add_argument("--json", action="store_true", help="print JSON")
    verify.set_defaults(handler="launch.commands.data:verify")

    reindex = actions.add_parser(
        "reindex",
        help="make lost or damaged indexes anew",
        description="Makes the .idx of each shard from its tar headers and writes those that are missing or wrong, if "
        "they are what the manifest says. Exit code 2 if a shard gives another one.",
    )
    reindex.add_argument("source", metavar="SOURCE", nargs="+", help="directory or URL with manifest.json")
    reindex.add_argument("--json", action="store_true", help="print JSON")
    reindex.set_defaults(handler="launch.commands.data:reindex")

    stats = actions.add_parser(
        "stats",
        help="show what built sources hold",
        description="Counts documents, lengths, padding and the use of the vocabulary by reading every block.",
    )
    stats.add_argument("source", metavar="SOURCE", nargs="+", help="directory or URL with manifest.json")
    stats.add_argument("--plot", metavar="FILE", help="draw the lengths of documents into a PNG file (one source)")
    stats.add_argument("--json", action="store_true", help="print JSON")
    stats.set_defaults(handler="launch.commands.data:stats")

    explain = actions.add_parser(
        "explain",
        help="show the text behind a row or a step",
        description=EXPLAIN_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    explain.add_argument("run", metavar="RUN|CONFIG", help="name or path of a run, or a config file (.yaml)")
    explain.add_argument("overrides", metavar="key=value", nargs="*", help="changes to a config file")
    which = explain.add_mutually_exclusive_group(required=True)
    which.add_argument("--row", type=int, metavar="N", help="global row number, from 0")
    which.add_argument("--step", type=int, metavar="N", help="optimizer step, from 0")
    explain.add_argument("--characters", type=int, default=200, metavar="N", help="text per document; 0 means all")
    explain.add_argument("--json", action="store_true", help="print JSON")
    explain.set_defaults(handler="launch.commands.data:explain")
    register_forecasts(actions)


def verify(args: argparse.Namespace) -> int:
    """Prints a line per source and each problem; USER_ERROR if there is any."""
    from pretrain.data.verify import verify_source
    from pretrain.store import open_store

    reports = [verify_source(open_store(source), threads=args.threads) for source in args.source]
    if args.json:
        print(json.dumps([report.to_json() for report in reports], indent=2))
    else:
        for report in reports:
            state = f"{len(report.problems)} problems" if report.problems else "good"
            print(
                f"{report.url}: {state} ({report.shards:,} shards, {report.blocks:,} blocks, "
                f"{report.documents:,} documents, {report.tokens:,} tokens)"
            )
            for problem in report.problems[:_SHOWN_PROBLEMS]:
                print(f"  {problem}")
            if len(report.problems) > _SHOWN_PROBLEMS:
                print(f"  … and {len(report.problems) - _SHOWN_PROBLEMS} more (--json shows all)")
    return ExitCode.USER_ERROR if any(report.problems for report in reports) else ExitCode.DONE


def reindex(args: argparse.Namespace) -> int:
    """Prints a line per source, each index that was written and each problem; USER_ERROR if there is any."""
    from pretrain.data.reindex import reindex_source
    from pretrain.store import open_store

    reports = [reindex_source(open_store(source)) for source in args.source]
    if args.json:
        print(json.dumps([report.to_json() for report in reports], indent=2))
    else:
        for report in reports:
            print(
                f"{report.url}: {report.shards:,} shards, {report.good:,} indexes right, {len(report.written):,} "
                f"written, {len(report.problems):,} problems"
            )
            for line in (*(f"wrote {name}" for name in report.written), *report.problems):
                print(f"  {line}")
    return ExitCode.USER_ERROR if any(report.problems for report in reports) else ExitCode.DONE


def stats(args: argparse.Namespace) -> int:
    """Prints a table per source."""
    from launch.outputs import write_output
    from launch.tables import format_table
    from pretrain.data.stats import source_stats
    from pretrain.store import open_store

    if args.plot and len(args.source) != 1:
        raise UserError(f"--plot={args.plot} is one picture of one source, and {len(args.source)} are named. Name one.")
    found = [source_stats(open_store(source)) for source in args.source]
    if args.plot:
        from pretrain.data.length_plot import draw_lengths

        write_output("--plot", args.plot, draw_lengths(found[0].manifest.name, found[0].histogram))
    if args.json:
        print(json.dumps([item.to_json() for item in found], indent=2, ensure_ascii=False))
        return ExitCode.DONE
    for item in found:
        manifest = item.manifest
        print(
            f"{manifest.name}: {manifest.documents:,} documents, {manifest.text_bytes / 1e6:,.1f} MB of text, "
            f"{manifest.tokens + manifest.source_tokens:,} tokens "
            f"({manifest.text_bytes / (manifest.tokens + manifest.source_tokens):.2f} bytes each) in "
            f"{manifest.blocks:,} blocks, {len(manifest.shards):,} shards; "
            f"{item.ids_used:,} of {manifest.vocabulary_size:,} ids occur"
            + (
                ""
                if item.trained_fraction is None
                else f"; {100 * item.trained_fraction:.1f} % of the tokens are trained"
            )
        )
        rows = [[side, *lengths.values(), 100 * item.fill_fraction[side]] for side, lengths in item.lengths.items()]
        header = ["tokens per document", *next(iter(item.lengths.values())), "fill %"]
        print(format_table(header, rows))
    return ExitCode.DONE


def explain(args: argparse.Namespace) -> int:
    """Prints the rows with their documents."""
    from pretrain.data.explain import explain_rows, explain_step, format_explanations

    config, state = _config_and_state(args.run, args.overrides)
    if args.row is not None:
        found = explain_rows(config, range(args.row, args.row + 1), state=state)
    else:
        found = explain_step(config, args.step, state=state)
    if args.json:
        print(json.dumps([item.to_json() for item in found], indent=2, ensure_ascii=False))
    else:
        print(format_explanations(found, characters=args.characters))
    return ExitCode.DONE


def _config_and_state(name: str, overrides: list[str]) -> tuple[RunConfig, DataState | None]:
    """A config file with overrides, or a run with the data state of its newest checkpoint.

    Raises:
        UserError: neither, or overrides of a run.
    """
    if Path(name).suffix in (".yaml", ".yml"):
        from pretrain.config import load_config

        return load_config(name, overrides), None
    if overrides:
        raise UserError(
            f"{overrides[0]} cannot change the run {name}. What a run has read is settled. Give a config file "
            "(.yaml) with overrides, or the run without them."
        )
    from launch.documents import newest_data_state
    from pretrain.rundir import RunDirectory

    directory = RunDirectory.locate(name)
    return directory.config(), newest_data_state(directory)
