"""`pretrain status RUN`: where a run is, read from its directory alone."""

from __future__ import annotations

import argparse


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "status",
        help="show where a run is",
        description="Shows state, step, loss, speed and last checkpoint of a run. Only reads its directory.",
    )
    parser.add_argument("run", metavar="RUN", help="name or path of the run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler="launch.runs:run_status")
