"""`pretrain report RUN`: where the time of a run went."""

from __future__ import annotations

import argparse


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "report",
        help="show where the time of a run went",
        description="Accounts for every second since a run was created: training, starts, rework, saves, validation, "
        "waits; its restarts by cause and phase; its attempts. --html writes curves, ranks and checkpoints too, "
        "as one file to keep or send. Only reads the run's directory.",
    )
    parser.add_argument("run", metavar="RUN", help="name or path of the run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", metavar="FILE", help="write a page with curves that needs nothing but itself")
    parser.set_defaults(handler="launch.monitor.report:run_report")
