"""`pretrain doctor`: is this machine fit to train, and is anything left over from dead runs."""

from __future__ import annotations

import argparse

from launch.commands.arguments import positive


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine and clean up after dead runs",
        description="Checks packages, compiler, limits, memory, disk, clock, names, network and devices of this "
        "machine, and removes what killed runs left behind.",
    )
    parser.add_argument(
        "--slots",
        type=positive,
        default=0,
        metavar="N",
        help="also compute on N slots at once: which is slow, which wrong",
    )
    parser.add_argument("--address", help="every node and slot of a Ray cluster instead: HOST:6379 or auto")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="what a slot is (default cpu)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler="launch.doctor:run_doctor")
