"""`pretrain plan`: will it fit, how long will it take, what will it cost."""

from __future__ import annotations

import argparse

DESCRIPTION = """\
Memory of a rank by part, seconds per step, tokens a day, cost, and what failures cost, for a config on a number of
GPUs. Nothing is started or read. A run that does not fit ends with 2 and names the layout that does. Where data.stages
change the batch, the plan is for the micro-batch with the most tokens."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="memory, time and cost of a run before it is started",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file of the run")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="changes to the config")
    parser.add_argument(
        "--gpus", metavar="NxKIND", help="such as 64xH100 (default: cluster.num_ranks x cluster.nodes.accelerator)"
    )
    parser.add_argument("--price", type=float, help="dollars per GPU and hour (default: a round list price)")
    parser.add_argument(
        "--mtbf-hours", type=float, help="mean hours between failures of one GPU (default: 50,700, Llama 3's training)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler="launch.plan.report:run_plan")
