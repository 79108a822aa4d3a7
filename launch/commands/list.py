"""`pretrain list`: the runs under PRETRAIN_HOME."""

from __future__ import annotations

import argparse


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "list",
        help="list the runs and their states",
        description="Lists the runs under PRETRAIN_HOME (default ./runs). Only reads run directories.",
    )
    parser.add_argument("--home", help="look here instead of PRETRAIN_HOME")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler="launch.runs:run_list")
