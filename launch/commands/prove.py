"""`pretrain prove CONFIG`: kill and resume against uninterrupted, bit for bit."""

from __future__ import annotations

import argparse
import sys

from pretrain.errors import ExitCode

DESCRIPTION = """\
Trains the config twice on this machine: once untouched, and once with kill -9 at random moments, of the whole
`pretrain train` process followed by `pretrain resume`, and in turn of a rank, of all ranks, of an agent. Then
compares every step's loss, gradient norm and data digest, the final state and the sha256 of the final weights, and
draws both curves. Every kill must provably have fired. The two runs lie under PRETRAIN_HOME while it works and are
removed afterwards; the picture stays in PRETRAIN_HOME/proofs.

exit codes: 0 equal bit for bit, 2 user error, 3 not equal, or a run failed"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "prove",
        help="kill and resume against uninterrupted, bit for bit",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file of the run")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="changes to the config, such as schedule.total_steps=20"
    )
    parser.add_argument("--kills", type=int, default=3, metavar="N", help="how often to kill (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments and targets of the kills (default 0)")
    parser.add_argument("--keep", action="store_true", help="keep the two runs and their output")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler="launch.commands.prove:run")


def run(args: argparse.Namespace) -> int:
    """Proves, prints the table or JSON; progress goes to stderr."""
    from launch.prove import ProveOptions, prove
    from launch.tables import print_json

    options = ProveOptions(args.config, tuple(args.overrides), args.kills, args.seed, args.keep)
    proof = prove(options, say=lambda text: print(text, file=sys.stderr, flush=True))
    if args.json:
        print_json(proof.to_json())
    else:
        print(proof.to_text())
    return ExitCode.DONE if proof.equal else ExitCode.FAILED
