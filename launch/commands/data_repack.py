"""`pretrain data repack`: other blocks, rows or shards for a built source, without tokenising again."""

from __future__ import annotations

import argparse
import json

from pretrain.errors import ExitCode

DESCRIPTION = """\
Writes a source anew with other sizes: what comes out is byte for byte what `data build` gives with these options.
What is not given stays as it is.

  pretrain data repack data/books data/books-rows --row-tokens 4096 --over-long split
  pretrain data repack data/pairs data/pairs-512 --source-length 512 --target-length 552"""


def register(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "repack",
        help="change blocks and rows without tokenising again",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", help="directory or URL with manifest.json")
    parser.add_argument("out", metavar="OUT", help="directory or URL that will appear; must not exist")
    parser.add_argument("--name", help="of the new source (default: the source's own)")
    parser.add_argument("--block-tokens", type=int, metavar="N", help="tokens of a block of plain text")
    parser.add_argument("--row-tokens", type=int, metavar="N", help="rows of whole documents; 0 cuts documents again")
    parser.add_argument("--source-length", type=int, metavar="N", help="source tokens of a row of pairs")
    parser.add_argument("--target-length", type=int, metavar="N", help="target tokens of a row of pairs")
    parser.add_argument("--rows-per-block", type=int, metavar="N", help="rows of a block of pairs")
    parser.add_argument("--shard-blocks", type=int, metavar="N", help="blocks of a shard")
    parser.add_argument("--over-long", choices=("fail", "drop", "cut", "split"),
                        help="what happens to a document or pair that no row can hold")  # fmt: skip
    parser.add_argument("--workers", type=int, metavar="N", help="processes that work (default: all CPUs)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler="launch.commands.data_repack:repack")


def repack(args: argparse.Namespace) -> int:
    """Repacks and prints both layouts."""
    from launch.build_view import progress_line
    from launch.tables import format_table
    from pretrain.data.repack import RepackOptions
    from pretrain.data.repack import repack as repack_source

    names = ("source", "out", "name", "block_tokens", "row_tokens", "rows_per_block", "source_length", "target_length",
             "shard_blocks", "over_long", "workers")  # fmt: skip
    before, after = repack_source(RepackOptions(**{name: getattr(args, name) for name in names}), progress_line())
    if args.json:
        described = [manifest.body() | {"sha256": manifest.sha256} for manifest in (before, after)]
        print(json.dumps(dict(zip(("source", "out"), described, strict=True)), indent=2, ensure_ascii=False))
        return ExitCode.DONE
    rows = [
        [place, m.documents, m.blocks, len(m.shards), m.row_tokens or m.target_capacity or None,
         m.source_capacity or None, 100 * m.fill_fraction, m.dropped, m.shortened]
        for place, m in ((args.source, before), (args.out, after))
    ]  # fmt: skip
    header = ["source", "documents", "blocks", "shards", "row", "source side", "fill %", "left out", "cut"]
    print(format_table(header, rows))
    return ExitCode.DONE
