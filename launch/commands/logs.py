"""`pretrain logs RUN`: what the ranks of a run printed."""

from __future__ import annotations

import argparse


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "logs",
        help="print or follow the logs of a run's ranks",
        description="Prints the logs of all ranks of the newest attempt, each line behind its rank (in colour on a "
        "terminal), or the log of one rank as it is. -f goes on until the run ends, across attempts. Each line is "
        "printed once; equal lines of several ranks are all printed.",
    )
    parser.add_argument("run", metavar="RUN", help="name or path of the run")
    parser.add_argument("-f", "--follow", action="store_true", help="go on printing until the run ends")
    parser.add_argument("--rank", type=int, help="print the log of this rank only")
    parser.add_argument("--attempt", type=int, help="attempt whose log is printed (default: the newest)")
    parser.add_argument("--controller", action="store_true", help="print the log of the run's controller instead")
    parser.set_defaults(handler="launch.logs:run_logs")
