"""`pretrain cluster render`: the file that a kind of cluster wants, from the `cluster` section of a config.

Takes kind and config → text on stdout or in a file. A new kind is one module with `render(fleet)` and a line here.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from launch.clusters.fleet import fleet_of, local_home
from pretrain.config import RunConfig, load_config
from pretrain.errors import ExitCode, UserError

_MODULES = {"ray": "ray_launcher"}
_SHARED_FILES = ("slurm", "ray")  # their nodes may see this machine's directories


def run_render(args: argparse.Namespace) -> int:
    """Handler of `pretrain cluster render`."""
    # Paths are those of the nodes: whether they exist is not for this machine to say.
    text = render(args.kind, load_config(args.config, args.overrides, check_files=False), cluster=args.cluster)
    if args.out is None:
        sys.stdout.write(text)
        return int(ExitCode.DONE)
    path = Path(args.out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise UserError(
            f"--out={path} cannot be written: {error.strerror}. It is a file. Choose another place."
        ) from None
    print(f"wrote {path}", file=sys.stderr)
    return int(ExitCode.DONE)


def render(kind: str, config: RunConfig, *, cluster: bool = False) -> str:
    """The file's text.

    Args:
        kind: a key of `launch.clusters.KINDS`.
        cluster: kuberay only: a cluster to submit to instead of a job.

    Raises:
        UserError: the config lacks what this kind needs.
    """
    module = importlib.import_module(f"launch.clusters.{_MODULES.get(kind, kind)}")
    fleet = fleet_of(config, kind=kind, home=local_home() if kind in _SHARED_FILES else None)
    if cluster and kind != "kuberay":
        raise UserError(f"--cluster has no effect on {kind}. Only KubeRay knows jobs and clusters. Leave it out.")
    text: str = module.render(fleet, "cluster") if cluster else module.render(fleet)
    return text
