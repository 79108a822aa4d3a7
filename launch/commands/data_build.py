"""`pretrain data build`: raw text to shards, on this machine or on a Ray cluster."""

from __future__ import annotations

import argparse
import json
import sys

from launch.commands.data_inputs import add_input_arguments, real, size, source_spec
from pretrain.errors import ExitCode, UserError

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
Plain text is cut into blocks, or with --row-tokens packed as whole documents into rows; pairs are always packed whole.
A build that was killed goes on when it is started again with the same inputs and options.

  pretrain data build pairs.jsonl --out data/pairs --tokenizer tokenizer.json \\
      --source-field en --target-field de --source-length 256 --target-length 256"""


def register(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "build",
        help="turn raw text into shards",
        description=BUILD_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_input_arguments(parser)
    parser.add_argument("--out", required=True, metavar="DIR",
                        help="directory or URL (s3://…) that will appear; must not exist")  # fmt: skip
    parser.add_argument("--tokenizer", required=True, metavar="FILE",
                        help="tokenizer.json that loses no text, or the directory of one")  # fmt: skip
    parser.add_argument("--name", default="", help="name of the source (default: the directory's)")
    parser.add_argument("--block-tokens", type=int, default=65536, metavar="N",
                        help="tokens of a block (default 65536); sequence lengths must divide it")  # fmt: skip
    parser.add_argument("--row-tokens", type=int, default=0, metavar="N",
                        help="pack whole documents into rows of N tokens instead of cutting them at rows")  # fmt: skip
    parser.add_argument("--over-long", choices=("fail", "drop", "cut", "split"), default="fail",
                        help="what happens to a document or pair that no row can hold: an error (default), left out, "
                        "cut to fit, or split into rows (not pairs)")  # fmt: skip
    parser.add_argument("--shard-blocks", type=int, default=512, metavar="N", help="blocks of a shard (default 512)")
    parser.add_argument("--source-length", type=int, default=0, metavar="N", help="source tokens of a row of pairs")
    parser.add_argument("--target-length", type=int, default=0, metavar="N", help="target tokens of a row of pairs")
    parser.add_argument("--rows-per-block", type=int, default=64, metavar="N", help="rows of a block of pairs "
                        "(default 64)")  # fmt: skip
    parser.add_argument("--validation-fraction", type=real, default=0.0, metavar="F",
                        help="hold out this share of the documents: OUT/train and OUT/validation")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of the shuffle (default 0)")
    duplicates = parser.add_mutually_exclusive_group()
    duplicates.add_argument("--deduplicate", action="store_true", default=True,
                            help="drop documents with the same content (default)")  # fmt: skip
    duplicates.add_argument("--keep-duplicates", dest="deduplicate", action="store_false", help="keep them")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that work (default: all CPUs)")
    parser.add_argument("--memory", type=size, metavar="SIZE",
                        help="about what text may take in all processes together, such as 1GB")  # fmt: skip
    parser.add_argument("--work", metavar="DIR", help="where unfinished work lies (default: OUT.partial)")
    parser.add_argument(
        "--ray", action="store_true", help="build on a Ray cluster: OUT and INPUT are where all see them"
    )
    parser.add_argument("--address", metavar="ADDRESS", help="of the Ray cluster (default: the one that Ray finds)")
    parser.add_argument("--no-plot", dest="plot", action="store_false",
                        help="do not draw the lengths of documents into OUT/lengths.png")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler="launch.commands.data_build:build")


def build(args: argparse.Namespace) -> int:
    """Builds and prints where the sources are and what was left out."""
    from launch.build_view import describe_build, plot_build, progress_line
    from pretrain.data.build import BuildOptions, OpenPool, local_pool
    from pretrain.data.build import build as build_sources

    options = BuildOptions(
        source=source_spec(args),
        out=args.out,
        tokenizer=args.tokenizer,
        name=args.name,
        block_tokens=args.block_tokens,
        row_tokens=args.row_tokens,
        over_long=args.over_long,
        shard_blocks=args.shard_blocks,
        source_length=args.source_length,
        target_length=args.target_length,
        rows_per_block=args.rows_per_block,
        validation_fraction=args.validation_fraction,
        seed=args.seed,
        deduplicate=args.deduplicate,
        max_bytes=args.max_bytes,
        workers=args.workers,
        memory_bytes=args.memory,
        work=args.work,
    )
    open_pool: OpenPool = local_pool
    if args.ray:
        from launch.data_build import ray_pool

        open_pool = ray_pool(args.address)
    elif args.address:
        raise UserError(f"address={args.address} is of a Ray cluster. A build uses one only if it is told. Add --ray.")
    report = build_sources(options, progress_line(), notice=_notice, open_pool=open_pool)
    picture = plot_build(report, options.out) if args.plot else None
    if args.json:
        print(json.dumps(report.to_json(), indent=2, ensure_ascii=False))
    else:
        print(describe_build(report))
        if picture:
            print(f"lengths of documents  {picture}")
    return ExitCode.DONE


def _notice(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
