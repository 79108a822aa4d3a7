"""`pretrain cluster`: files for schedulers and clouds; a cluster of several nodes on this machine."""

from __future__ import annotations

import argparse

from launch.clusters import KINDS

RENDER = """\
Writes the file that a kind of cluster wants, from cluster.nodes and the section of that kind in the config. It holds
the whole config, starts Ray with a token, and its command starts the run or goes on with it."""
UP = """\
Without a config: Ray with several nodes on this machine, for trying out what a cluster does. Its address and token
are printed as shell commands: eval "$(pretrain cluster up)". With a config: cluster.launcher, through ray up."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "cluster", help="files for Slurm, KubeRay, Ray's launcher, SkyPilot; a cluster on this machine"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_render(actions)
    up = actions.add_parser(
        "up", help="start a cluster", description=UP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    up.add_argument("config", metavar="CONFIG", nargs="?", help="YAML file of a run with cluster.launcher")
    up.add_argument("overrides", metavar="key=value", nargs="*", help="changes to the config")
    up.add_argument("--nodes", type=int, default=2, help="nodes on this machine (default 2)")
    up.add_argument("--slots", type=int, default=1, help="ranks that each of them holds (default 1)")
    up.set_defaults(handler="launch.clusters.up:run_up")
    down = actions.add_parser(
        "down", help="end it", description="Ends the cluster that `pretrain cluster up` started, and nothing else."
    )
    down.add_argument("config", metavar="CONFIG", nargs="?", help="the config that it was started with, if any")
    down.add_argument("overrides", metavar="key=value", nargs="*", help="changes to the config")
    down.set_defaults(handler="launch.clusters.up:run_down")


def _add_render(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    render = actions.add_parser(
        "render",
        help="write the file that a kind of cluster wants",
        description=RENDER,
        epilog="\n".join(f"  {kind:<10}{text}" for kind, text in KINDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    render.add_argument("kind", choices=list(KINDS), metavar="KIND", help="slurm, kuberay, ray or skypilot")
    render.add_argument("config", metavar="CONFIG", help="YAML file of the run")
    render.add_argument("overrides", metavar="key=value", nargs="*", help="changes to the config")
    render.add_argument("--out", metavar="FILE", help="write there instead of stdout")
    render.add_argument(
        "--cluster", action="store_true", help="kuberay: a RayCluster to submit to, instead of a RayJob"
    )
    render.set_defaults(handler="launch.clusters.render:run_render")
