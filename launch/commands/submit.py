"""`pretrain submit CONFIG --address …`: a run as a job on a Ray cluster that is already up."""

from __future__ import annotations

import argparse

from launch.commands.train import add_start_options

DESCRIPTION = """\
Hands the run to a Ray cluster and returns its name. The run goes on when this machine is gone, and is
started again when its driver dies. Data, tokenizer and run directory must lie where the cluster sees them."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "submit",
        help="train a config as a job on a Ray cluster",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_start_options(parser)
    parser.add_argument(
        "--address", required=True, help="http://HEAD:8265 (Jobs API), HOST:6379 (Ray) or auto (this machine's Ray)"
    )
    parser.add_argument(
        "--wait",
        action="store_true",
        help="stay until the run has ended and give its exit code; TERM and USR1 make it save and end with 5",
    )
    parser.set_defaults(handler="launch.job:run_submit")
