"""`python -m pretrain`: one rank, with or without an agent.

    python -m pretrain CONFIG [key=value …] [--name N] [--resume never|auto|must]   one process, or under torchrun
    python -m pretrain --run RUN --attempt N                                        as an agent starts it
    python -m pretrain --standby                                                    imports all, becomes the one above

Ends with a code of `pretrain.errors.ExitCode`; a foreseen failure is one `error:` line, no traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Sequence

from pretrain.errors import ExitCode, PretrainError
from pretrain.log import Log
from pretrain.processor import use_large_pages


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank to its end and gives its exit code."""
    use_large_pages()  # before torch is imported
    parser = _parser()
    args = parser.parse_intermixed_args(arguments)
    began: float | None = None
    if args.standby or args.run is not None:
        from pretrain.train.watch import answer_stacks

        answer_stacks()  # before the imports: the signal would end a process that does not expect it
    if args.standby:
        try:
            from pretrain.train.standby import become_rank

            args = parser.parse_intermixed_args(become_rank())
        except PretrainError as error:
            Log().error(str(error))
            return error.exit_code
        began = time.monotonic()
    under_agent = args.run is not None
    if under_agent == (args.config is not None):
        parser.error("give either CONFIG, or --run and --attempt")
    if under_agent and args.attempt is None:
        parser.error("--run needs --attempt")
    try:
        if under_agent:
            from pretrain.train.rank import run_under_agent

            return run_under_agent(args.run, args.attempt, began=began)
        from pretrain.train.rank import run_standalone

        return run_standalone(args.config, args.overrides, name=args.name, resume=args.resume, takeover=args.takeover)
    except PretrainError as error:
        Log(_rank()).error(str(error))
        return error.exit_code
    except Exception:
        traceback.print_exc()
        return ExitCode.FAILED


def _rank() -> int | None:
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pretrain",
        description="Train in this process, or under torchrun, without Ray. `pretrain train` is the supervised way.",
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the config")
    parser.add_argument("--name", help="name of the run; the config's if not given")
    parser.add_argument(
        "--resume",
        choices=("never", "auto", "must"),
        default="never",
        help="never: a new run (an existing name is an error); auto: start or go on; must: go on (default: never)",
    )
    parser.add_argument("--takeover", action="store_true", help="do not wait for the last trainer of this run to die")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--attempt", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--standby", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a full disk under a rank's log must not change its exit code
            stream.flush()
    # Threads of libraries (gloo, prefetch) must not delay or change the end of a rank whose work is done.
    os._exit(code)
