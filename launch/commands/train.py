"""`pretrain train CONFIG`: a run on this machine, with a local Ray started and stopped for it."""

from __future__ import annotations

import argparse

DESCRIPTION = """\
Trains on this machine. A local Ray is started for the run and stopped after it; nothing is left behind.
Ctrl-C once saves a checkpoint and ends (exit code 5); Ctrl-C twice ends at once."""


def add_start_options(parser: argparse.ArgumentParser) -> None:
    """What `train` and `submit` share."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file of the run")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="changes to the config, such as optimizer.learning_rate=1e-3"
    )
    parser.add_argument("--name", help="name of the run (default: `name` of the config)")
    parser.add_argument(
        "--resume",
        choices=["never", "auto", "must"],
        default="never",
        help="an existing run of that name: never = error (default), auto = go on or start, must = go on",
    )
    parser.add_argument("--takeover", action="store_true", help="do not wait for a holder of the run that is silent")


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a config on this machine",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_start_options(parser)
    parser.add_argument("--dry-run", action="store_true", help="check config, data and machine; start nothing")
    parser.set_defaults(handler="launch.train:run_train")
