"""`pretrain resume RUN`: goes on with a run on this machine, from its newest good checkpoint."""

from __future__ import annotations

import argparse


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "resume",
        help="go on with a run that ended or died",
        description="Goes on with a run on this machine, from its newest good checkpoint. "
        "Prints what changed in the config and what each change does.",
    )
    parser.add_argument("run", metavar="RUN", help="name or path of the run")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="changes to the run's config from here on")
    parser.add_argument("--takeover", action="store_true", help="do not wait for a holder of the run that is silent")
    parser.set_defaults(handler="launch.train:run_resume")
