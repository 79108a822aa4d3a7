"""`pretrain doctor`: is this machine fit to train, and is anything left over from dead runs."""

from __future__ import annotations

import argparse


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine and clean up after dead runs",
        description="Checks packages, memory, disk and devices, and removes what killed runs left behind.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler="launch.doctor:run_doctor")
