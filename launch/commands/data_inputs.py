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
    parser.add_argument("--messages-field", metavar="FIELD",
                        help="field of a list of {role, content}; what the trained roles say is a target")  # fmt: skip
    parser.add_argument("--train-role", metavar="ROLE", action="append", default=[],
                        help="role whose messages are targets (default assistant); may be given again")  # fmt: skip
    parser.add_argument("--message-template", metavar="TEXT", type=_unescaped, default=None,
                        help=r"how a message becomes text (default '{role}: {content}\n\n')")  # fmt: skip
    parser.add_argument("--prompt-field", metavar="FIELD", help="field of a text that is given, not trained")
    parser.add_argument("--completion-field", metavar="FIELD", help="field of the text behind it, which is trained")
    parser.add_argument("--spans-field", metavar="FIELD",
                        help="field of [[first, end], ...] characters of the text; only these are trained")  # fmt: skip
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
        trained=_trained_parts(args),
    )


def _trained_parts(args: argparse.Namespace) -> Any:
    """What the options say of trained parts; None if nothing. Raises DataError on options that do not go together."""
    from pretrain.data.trained_parts import DEFAULT_TEMPLATE, TrainedParts
    from pretrain.errors import DataError

    named = {name: getattr(args, f"{name}_field") for name in ("messages", "prompt", "completion", "spans")}
    if args.messages_field is None and (args.train_role or args.message_template is not None):
        raise DataError(
            "train_role and message_template have no effect without messages. They say what of a conversation is "
            "trained. Give --messages-field, or leave them out."
        )
    if not any(named.values()):
        return None
    template = DEFAULT_TEMPLATE if args.message_template is None else args.message_template
    return TrainedParts(**named, roles=tuple(args.train_role) or ("assistant",), template=template)


def _unescaped(text: str) -> str:
    r"""`\n` and `\t` as a shell's user writes them."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


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
