"""`pretrain tokenizer train`: a byte-level tokenizer from raw text."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

from launch.commands.data_inputs import add_input_arguments, source_spec
from pretrain.errors import ExitCode, UserError

DESCRIPTION = """\
Trains a byte-level tokenizer (BPE, or Unigram with --kind unigram) on the same inputs that `pretrain data build`
takes, duplicates left out. Ids 0, 1 and 2 are <|endoftext|>, <|pad|> and <|start|>; text that spells them stays text.

  pretrain tokenizer train books/ --out tokenizer.json --vocabulary-size 8192"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "tokenizer", help="train a tokenizer", description="Makes tokenizers for `pretrain data build`."
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    train_parser = actions.add_parser(
        "train",
        help="train a byte-level tokenizer on text",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_input_arguments(train_parser)
    train_parser.add_argument("--out", required=True, metavar="FILE", help="tokenizer.json to write; must not exist")
    train_parser.add_argument("--vocabulary-size", type=int, required=True, metavar="V", help="ids, specials included")
    train_parser.add_argument(
        "--kind",
        choices=("bpe", "unigram"),
        default="bpe",
        help="bpe (default: the same text gives the same file) or unigram (another one each time)",
    )
    train_parser.add_argument(
        "--sentinels", type=int, default=0, metavar="N",
        help="add <extra_id_0> … for span corruption and ul2 (T5 has 100)",
    )  # fmt: skip
    train_parser.add_argument(
        "--fill-in-the-middle", action="store_true", help="add <|fim_prefix|>, <|fim_suffix|> and <|fim_middle|>"
    )
    train_parser.add_argument("--modes", action="store_true", help="add the modes of ul2: <|mode_r|>, <|mode_s|>, …")
    train_parser.add_argument("--json", action="store_true", help="print JSON")
    train_parser.set_defaults(handler="launch.commands.tokenizer:train")


def train(args: argparse.Namespace) -> int:
    """Trains, writes the file, prints its facts.

    Raises:
        UserError: the file exists, the text is empty or too little.
    """
    from pretrain.data.selection import selected_texts
    from pretrain.data.sources import ReadCounts
    from pretrain.data.special_tokens import ExtraTokens
    from pretrain.data.tokenizer import train as train_tokenizer

    if Path(args.out).exists():
        raise UserError(f"out={args.out} exists. Data built with it would no longer fit. Choose another --out.")
    extra = ExtraTokens(args.sentinels, args.fill_in_the_middle, args.modes)
    extra.names()  # a wrong count is refused before the text is read
    started = time.monotonic()
    counts = ReadCounts()
    text_bytes = 0

    def counted() -> Iterator[str]:
        nonlocal text_bytes
        for text in selected_texts(source_spec(args), args.max_bytes, counts):
            text_bytes += len(text.encode())
            yield text

    tokenizer = train_tokenizer(counted(), args.vocabulary_size, args.kind, extra)
    tokenizer.save(args.out)
    seconds = time.monotonic() - started
    facts = {
        "path": args.out,
        "kind": args.kind,
        "vocabulary_size": tokenizer.vocabulary_size,
        "sha256": tokenizer.sha256,
        "text_bytes": text_bytes,
        "invalid": counts.invalid,
        "seconds": seconds,
    }
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        skipped = f", {counts.invalid:,} not UTF-8 left out" if counts.invalid else ""
        print(
            f"{args.out}: {tokenizer.vocabulary_size:,} ids from {text_bytes / 1e6:,.1f} MB of text{skipped}, "
            f"{seconds:.1f} s, sha256 {tokenizer.sha256[:12]}"
        )
    return ExitCode.DONE
