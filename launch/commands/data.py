"""`pretrain data build|verify|reindex|stats|explain|plan|mix`: raw text to shards, and what shards hold."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.commands.data_forecast import register_forecasts
from pretrain.config.units import parse_bytes, parse_real
from pretrain.errors import ExitCode, UserError

if TYPE_CHECKING:
    from pretrain.config import RunConfig
    from pretrain.data.state import DataState

BUILD_DESCRIPTION = """\
Builds block shards from raw text: documents are shuffled, duplicates dropped, tokenised on all CPUs and packed.
OUT appears when it is complete. Inputs are files, directories, quoted patterns (*, **, {a,b}, {000..012}) or URLs
(http://, s3://) of
  .txt .md .rst .py    a file is a document
  .jsonl .ndjson       a line is a document
  .parquet .arrow      a row is a document; a directory that Hugging Face datasets saved is read as such
  .tar                 WebDataset: KEY.txt is a document, KEY.json beside it its fields, KEY.json alone both
all but tables also as .gz and .zst. Parquet and arrow need pyarrow, .zst needs zstandard, s3:// needs s3fs.

  pretrain data build books/ 'web/*.jsonl.gz' --out data/books --tokenizer tokenizer.json --validation-fraction 0.01
  pretrain data build pairs.jsonl --out data/pairs --tokenizer tokenizer.json \\
      --source-field en --target-field de --source-length 256 --target-length 256"""

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
    _register_build(actions)
    verify = actions.add_parser(
        "verify",
        help="read and check every byte of built sources",
        description="Checks sizes, hashes, tar headers, token ids, document ends and sums. Exit code 2 if a "
        "source is damaged.",
    )
    verify.add_argument("source", metavar="SOURCE", nargs="+", help="directory or URL with manifest.json")
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


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """What to read: shared by `data build` and `tokenizer train`."""
    parser.add_argument("inputs", metavar="INPUT", nargs="+", help="files, directories or quoted patterns")
    parser.add_argument("--format", choices=("auto", "text", "jsonl", "parquet", "arrow", "tar"), default="auto",
                        help="auto goes by the suffix")  # fmt: skip
    parser.add_argument("--include", metavar="PATTERN", action="append", default=[],
                        help="names of files taken from directories, such as '*.py'; may be given again")  # fmt: skip
    parser.add_argument("--text-field", metavar="FIELD", default="text",
                        help="field or column of the text (default text)")  # fmt: skip
    parser.add_argument("--id-field", metavar="FIELD", default="id",
                        help="field of a document's id (default id); else file and line name it")  # fmt: skip
    parser.add_argument("--keep", metavar="FIELD", action="append", default=[],
                        help="field to keep with every document; may be given again")  # fmt: skip
    parser.add_argument("--source-field", metavar="FIELD", help="field of the source side of pairs")
    parser.add_argument("--target-field", metavar="FIELD", help="field of the target side of pairs")
    parser.add_argument("--max-bytes", type=_size, metavar="SIZE",
                        help="keep the documents with the smallest content hash that fit, such as 24MB")  # fmt: skip
    parser.add_argument("--invalid-utf8", choices=("fail", "skip"), default="fail",
                        help="text that is not UTF-8 is an error (default), or is skipped and counted")  # fmt: skip


def source_spec(args: argparse.Namespace) -> Any:
    """The `SourceSpec` of `add_input_arguments`. Raises DataError on half a pair."""
    from pretrain.data.sources import SourceSpec

    return SourceSpec(
        inputs=tuple(args.inputs),
        format=args.format,
        text_field=args.text_field,
        source_field=args.source_field,
        target_field=args.target_field,
        include=tuple(args.include),
        skip_invalid=args.invalid_utf8 == "skip",
        id_field=args.id_field,
        keep_fields=tuple(args.keep),
    )


def _register_build(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "build",
        help="turn raw text into shards",
        description=BUILD_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_input_arguments(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="directory that will appear; must not exist")
    parser.add_argument("--tokenizer", required=True, metavar="FILE",
                        help="tokenizer.json that loses no text, or the directory of one")  # fmt: skip
    parser.add_argument("--name", default="", help="name of the source (default: the directory's)")
    parser.add_argument("--block-tokens", type=int, default=65536, metavar="N",
                        help="tokens of a block (default 65536); sequence lengths must divide it")  # fmt: skip
    parser.add_argument("--shard-blocks", type=int, default=512, metavar="N", help="blocks of a shard (default 512)")
    parser.add_argument("--source-length", type=int, default=0, metavar="N", help="source tokens of a row of pairs")
    parser.add_argument("--target-length", type=int, default=0, metavar="N", help="target tokens of a row of pairs")
    parser.add_argument("--rows-per-block", type=int, default=64, metavar="N", help="rows of a block of pairs "
                        "(default 64)")  # fmt: skip
    parser.add_argument("--validation-fraction", type=_real, default=0.0, metavar="F",
                        help="hold out this share of the documents: OUT/train and OUT/validation")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of the shuffle (default 0)")
    duplicates = parser.add_mutually_exclusive_group()
    duplicates.add_argument("--deduplicate", action="store_true", default=True,
                            help="drop documents with the same content (default)")  # fmt: skip
    duplicates.add_argument("--keep-duplicates", dest="deduplicate", action="store_false", help="keep them")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that tokenise (default: all CPUs)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler="launch.commands.data:build")


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None


def _real(text: str) -> float:
    try:
        return parse_real(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None


def build(args: argparse.Namespace) -> int:
    """Builds and prints where the sources are and what was left out."""
    from launch.build_view import describe_build, progress_line
    from pretrain.data.build import BuildOptions
    from pretrain.data.build import build as build_sources

    options = BuildOptions(
        source=source_spec(args),
        out=args.out,
        tokenizer=args.tokenizer,
        name=args.name,
        block_tokens=args.block_tokens,
        shard_blocks=args.shard_blocks,
        source_length=args.source_length,
        target_length=args.target_length,
        rows_per_block=args.rows_per_block,
        validation_fraction=args.validation_fraction,
        seed=args.seed,
        deduplicate=args.deduplicate,
        max_bytes=args.max_bytes,
        workers=args.workers,
    )
    report = build_sources(options, progress_line())
    if args.json:
        print(json.dumps(report.to_json(), indent=2, ensure_ascii=False))
    else:
        print(describe_build(report))
    return ExitCode.DONE


def verify(args: argparse.Namespace) -> int:
    """Prints a line per source and each problem; USER_ERROR if there is any."""
    from pretrain.data.verify import verify_source
    from pretrain.store import open_store

    reports = [verify_source(open_store(source)) for source in args.source]
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
    from launch.tables import format_table
    from pretrain.data.stats import source_stats
    from pretrain.store import open_store

    found = [source_stats(open_store(source)) for source in args.source]
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
        )
        rows = [[side, *lengths.values(), 100 * item.fill_fraction[side]] for side, lengths in item.lengths.items()]
        header = ["tokens per document", *next(iter(item.lengths.values())), "fill %"]
        print(format_table(header, rows))
    return ExitCode.DONE


def explain(args: argparse.Namespace) -> int:
    """Prints the rows with their documents."""
    from pretrain.data.explain import explain_row, explain_step, format_explanations

    config, state = _config_and_state(args.run, args.overrides)
    if args.row is not None:
        found = [explain_row(config, args.row, state=state)]
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
    from pretrain.checkpoint import list_checkpoints
    from pretrain.checkpoint.files import read_manifest
    from pretrain.rundir import RunDirectory
    from pretrain.train.state import TrainingState

    directory = RunDirectory.locate(name)
    for info in list_checkpoints(directory.checkpoints):
        if info.problem is None:
            body = read_manifest(directory.checkpoints, info.name).training_state
            return directory.config(), TrainingState.from_json(body).data
    return directory.config(), None
