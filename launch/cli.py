"""The `pretrain` command: finds the subcommand, parses, calls its handler, turns errors into exit codes.

Each `launch.commands.<name>` has `register(subparsers)`, which adds its parser and names its handler
as text (`set_defaults(handler="launch.commands.<name>:<function>")`). Modules and handlers are
imported by name when needed, so `--help` never loads torch, ray or deepspeed. handler(args) -> exit code.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from launch.terminal import outlive_terminal
from pretrain.errors import ExitCode, PretrainError

COMMANDS = (
    "data",
    "tokenizer",
    "train",
    "submit",
    "list",
    "status",
    "logs",
    "stop",
    "resume",
    "watch",
    "dashboard",
    "report",
    "checkpoint",
    "generate",
    "evaluate",
    "inspect",
    "prove",
    "plan",
    "cluster",
    "doctor",
)

EPILOG = """\
a run from start to end:
  pretrain train configs/quickstart.yaml      train on this machine; Ctrl-C saves
  pretrain status RUN                         where it is
  pretrain resume RUN                         go on where it stopped

exit codes: 0 done, 2 user error, 3 run failed, 4 stopped on request, 5 interrupted and resumable,
            7 another process took the run over (--takeover)"""


def build_parser(commands: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """The whole argument tree, or only that of the commands named."""
    parser = argparse.ArgumentParser(
        prog="pretrain",
        description="Exact, fault-tolerant pretraining of Transformers on Ray and DeepSpeed.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    whole_words: Any = functools.partial(argparse.ArgumentParser, allow_abbrev=False)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=whole_words)
    for name in commands:
        importlib.import_module(f"launch.commands.{name}").register(subparsers)
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parses a command; `key=value` words may also stand after options, where argparse alone refuses them."""
    args, left = parser.parse_known_args(argv)
    if left:
        if not hasattr(args, "overrides") or any(word.startswith("-") or "=" not in word for word in left):
            meant = _meant(_chosen(parser, argv), left, hasattr(args, "overrides"))
            parser.error(f"unrecognized arguments: {' '.join(left)}{meant}")
        args.overrides = [*args.overrides, *left]
    return args


def _meant(parser: argparse.ArgumentParser, words: Sequence[str], has_config: bool) -> str:
    """What the first unknown option may have been meant to be."""
    option = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
    if option is None:
        return ""
    near = difflib.get_close_matches(option, sorted(_options(parser)), n=1)
    if near:
        return f". Did you mean {near[0]}?"
    return ". A value of the config is written key=value, without dashes." if has_config else ""


def _chosen(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the command that the words begin with."""
    below = next((one for one in parser._actions if isinstance(one, argparse._SubParsersAction)), None)
    if below is None or not words or words[0] not in below.choices:
        return parser
    return _chosen(below.choices[words[0]], words[1:])


def _options(parser: argparse.ArgumentParser) -> set[str]:
    """Every option of a parser."""
    return {option for action in parser._actions for option in action.option_strings}


def find_handler(name: str) -> Callable[[argparse.Namespace], int]:
    """`package.module:function` -> the function."""
    module, _, function = name.partition(":")
    handler: Callable[[argparse.Namespace], int] = getattr(importlib.import_module(module), function)
    return handler


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; foreseen errors end in one `error: …` on stderr and the code of their kind."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # One command loads one module; only help and mistakes need them all.
    known = argv[:1] if argv and argv[0] in COMMANDS else COMMANDS
    args = parse(build_parser(known), argv)
    try:
        return int(find_handler(args.handler)(args))
    except PretrainError as error:
        _complain(f"error: {error}")
        return int(error.exit_code)
    except KeyboardInterrupt:
        _complain("interrupted")
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:  # `pretrain logs RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.DONE)
    except Exception:
        _complain(
            f"{traceback.format_exc()}error: an internal error, not foreseen (above). Please report it with this text."
        )
        return int(ExitCode.FAILED)


def _complain(text: str) -> None:
    """The last words; that nobody can read them does not change the exit code."""
    with outlive_terminal():
        print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
