"""Options that say which raw text is read: shared by `data build` and `tokenizer train`."""

from __future__ import annotations

import argparse
from typing import Any

from pretrain.config.units import parse_bytes, parse_real


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
    parser.add_argument("--max-bytes", type=size, metavar="SIZE",
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


def size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None


def real(text: str) -> float:
    try:
        return parse_real(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None
