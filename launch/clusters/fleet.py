"""The machines that a config asks for, and what runs on them: the part that all kinds of clusters share. PURE.

Takes a config → `Fleet`. The command on the head is the same everywhere: it starts the run or goes on with it,
stays until its end and saves when it is told to go. Own design (DESIGN section 7).
"""

from __future__ import annotations

import importlib.metadata
import os
import shlex
from dataclasses import dataclass
from typing import Any

import yaml

from pretrain.config import RunConfig, dump_yaml
from pretrain.config.cluster_targets import NodesConfig
from pretrain.errors import UserError
from pretrain.rundir import home_url

LEAST_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's own least


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a cluster must have for a run.

    Attributes:
        num_nodes: machines that train, spares included.
        home: directory or URL of the runs, as the nodes see it.
    """

    config: RunConfig
    nodes: NodesConfig
    num_nodes: int
    home: str

    @property
    def spares(self) -> int:
        """Nodes, of `num_nodes`, that wait for another one to fail."""
        return self.nodes.spares

    @property
    def slots(self) -> int:
        """Ranks that a node holds."""
        return self.nodes.ranks

    @property
    def on_gpus(self) -> bool:
        return self.config.cluster.device == "cuda"

    @property
    def elastic(self) -> bool:
        """A lost node is replaced or done without, so the others stay."""
        cluster = self.config.cluster
        return self.spares > 0 or (cluster.min_ranks or cluster.num_ranks) < cluster.num_ranks

    @property
    def ray_cpus(self) -> int:
        """CPUs that Ray counts on a node: without GPUs they are the slots."""
        return self.nodes.cpus if self.on_gpus else self.slots

    @property
    def ray_gpus(self) -> int:
        return self.slots if self.on_gpus else 0

    @property
    def shared_memory_bytes(self) -> int:
        return self.nodes.shared_memory if self.nodes.shared_memory is not None else self.nodes.memory // 4

    @property
    def object_store_bytes(self) -> int:
        """Of Ray: tensors of a step never go through it, copies of the memory tier do."""
        return max(LEAST_OBJECT_STORE_BYTES, self.shared_memory_bytes // 4)

    def environment(self) -> dict[str, str]:
        """What every process of the run gets, tokens and secrets left out."""
        interface = self.nodes.interface
        names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if interface else ()
        return {
            "PRETRAIN_HOME": self.home,
            "RAY_USAGE_STATS_ENABLED": "0",
            **{name: str(interface) for name in names},
        }

    def exports(self) -> list[str]:
        """The same as lines of a shell."""
        return [f"export {name}={shlex.quote(value)}" for name, value in self.environment().items()]

    def config_text(self) -> str:
        """The run's config, resolved: a rendered file needs no other."""
        return dump_yaml(self.config)

    def title(self) -> str:
        """One line on what it is."""
        kind = self.nodes.accelerator or ("GPU" if self.on_gpus else "CPU slot")
        spares = f", {self.spares} of them spare" if self.spares else ""
        return f"run {self.config.name}: {self.num_nodes} nodes of {self.slots} ranks ({kind} each){spares}"


def fill(template: str, fleet: Fleet, entry: str, **values: str) -> str:
    """A shell template with @NAME@ replaced: what every kind of fleet needs, its own `values`, the config last.

    Args:
        entry: the command that every node or the head runs in the end.
    """
    everywhere = {
        "SETUP": "\n".join(fleet.nodes.setup) or ":",
        "EXPORTS": "\n".join(fleet.exports()),
        "RAY_CPUS": str(fleet.ray_cpus),
        "RAY_GPUS": str(fleet.ray_gpus),
        "OBJECT_STORE": str(fleet.object_store_bytes),
        "ENTRY": entry,
    }
    for name, value in (everywhere | values | {"CONFIG": fleet.config_text()}).items():  # in it nothing is replaced
        template = template.replace(f"@{name}@", value)
    return template


def fleet_of(config: RunConfig, *, kind: str, home: str | None = None) -> Fleet:
    """The machines of a config.

    Args:
        kind: of cluster, for the message.
        home: where runs lie when the config does not say; none means it must.

    Raises:
        UserError: the config does not say what a node is, or where runs lie.
    """
    nodes = config.cluster.nodes
    if nodes is None:
        raise UserError(
            "cluster.nodes is missing. A file for a cluster needs to know what one of its nodes is. "
            "Set cluster.nodes.ranks, cluster.nodes.cpus and cluster.nodes.memory."
        )
    if nodes.home is None and home is None:
        raise UserError(
            f"cluster.nodes.home is missing. Nodes of {kind} do not have this machine's directories. "
            "Set it to a directory of a shared volume or to a URL such as s3://bucket/runs."
        )
    num_nodes = -(-config.cluster.num_ranks // nodes.ranks) + nodes.spares
    return Fleet(config, nodes, num_nodes, str(nodes.home or home))


def local_home() -> str:
    """The home of runs here, as an absolute path or URL: right for nodes that share this file system."""
    home = home_url()
    return home if "://" in home else os.path.abspath(home)


def require_image(fleet: Fleet, kind: str) -> str:
    """The container image. Raises UserError when there is none, or when it can change under the run."""
    image = fleet.nodes.image
    if image is None:
        raise UserError(
            f"cluster.nodes.image is missing. {kind} runs containers. Build one with make image, push it, and set "
            "cluster.nodes.image to its digest."
        )
    name = image.rsplit("/", 1)[-1]
    if "@" not in name and (":" not in name or name.endswith(":latest")):
        raise UserError(
            f"cluster.nodes.image={image} can change between two starts of one run. The rule: a digest (NAME@sha256:…) "
            "or a version's tag. Set one."
        )
    return image


def entry_command(config_path: str, address: str = "auto") -> str:
    """What the head runs: starts the run or goes on with it, and stays."""
    return f"pretrain submit {config_path} --address {address} --resume auto --wait"


def ray_version() -> str:
    """Of the Ray that is installed here; the image must have the same."""
    return importlib.metadata.version("ray")


def dump(document: dict[str, Any]) -> str:
    """YAML in the order given; text of several lines stays readable."""
    return str(yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=110))


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)
