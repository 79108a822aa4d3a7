"""The sections of `cluster` that say what the machines are: a node, and what each kind of cluster wants to know of it.

`pretrain cluster render` and `pretrain plan` read them; training itself does not, so a resume may change them all.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from pretrain.config.section import Section, setting
from pretrain.config.units import Bytes, Count, Flag, Location, PositiveInt, Seconds, Text, parse_text

_LABEL = r"[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?"
_TOLERATION = re.compile(rf"{_LABEL}(=[A-Za-z0-9._-]*)?(:(NoSchedule|PreferNoSchedule|NoExecute))?")
DNS_NAME = r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$"


def _parse_toleration(value: Any) -> str:
    text = parse_text(value)
    if not _TOLERATION.fullmatch(text):
        raise ValueError("is not a taint. Write key, key:NoSchedule or key=value:NoSchedule, as kubectl taint does")
    return text


def _parse_sbatch_option(value: Any) -> str:
    text = parse_text(value)
    if not re.fullmatch(r"--[a-z][a-z0-9-]*(=\S+)?", text):
        raise ValueError("is not an option of sbatch. Write --option or --option=value")
    return text


def _parse_line(value: Any) -> str:
    text = parse_text(value)
    if "\n" in text or not text.strip():
        raise ValueError("is not one shell command. Write one per entry of the list")
    return text


def _on_nodes(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError("is not an absolute path. It is a place inside of a container. Begin it with /")
    return value


ShellLine = Annotated[str, BeforeValidator(_parse_line)]
Toleration = Annotated[str, BeforeValidator(_parse_toleration)]
SbatchOption = Annotated[str, BeforeValidator(_parse_sbatch_option)]
MountPath = Annotated[str, BeforeValidator(parse_text), AfterValidator(_on_nodes)]


class NodesConfig(Section):
    """One machine of the cluster; all that train are alike."""

    ranks: PositiveInt = setting("ranks of a node: its GPUs, or its CPU slots", resume="free")
    cpus: PositiveInt = setting("CPU cores of a node that the run may use", resume="free")
    memory: Bytes = setting("host memory of a node that the run may use", resume="free", ge=2**30)
    shared_memory: Bytes | None = setting(
        "size of /dev/shm in a container: Ray's object store and the memory tier of checkpoints; "
        "none means a quarter of memory",
        resume="free",
        default=None,
    )
    spares: Count = setting("nodes that wait for another one to fail", resume="free", default=0)
    accelerator: Text | None = setting(
        "kind of GPU in the words of the cloud, such as H100 or A100-80GB", resume="free", default=None
    )
    home: Location | None = setting(
        "directory or URL of the runs as the nodes see it; none means PRETRAIN_HOME of whoever renders",
        resume="free",
        default=None,
    )
    image: Text | None = setting("container image, by digest or by a version's tag", resume="free", default=None)
    setup: list[ShellLine] = setting(
        "shell commands on a node before anything else, such as source /opt/venv/bin/activate",
        resume="free",
        default=[],
    )
    interface: Text | None = setting(
        "network interface of collectives (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME); none lets them choose",
        resume="free",
        default=None,
        pattern=r"^[A-Za-z0-9_.=^,-]+$",
    )


class SlurmConfig(Section):
    """What sbatch wants to know."""

    partition: Text | None = setting("partition; none means the default one", resume="free", default=None)
    account: Text | None = setting("account; none means the user's own", resume="free", default=None)
    qos: Text | None = setting("quality of service; none means the default one", resume="free", default=None)
    time_limit_s: Seconds = setting("longest time of one allocation; the job goes on in the next", resume="free", ge=60)
    grace_s: Seconds = setting(
        "USR1 comes so long before the end of the allocation: time for the last checkpoint",
        resume="free",
        default=300.0,
        ge=10,
    )
    exclusive: Flag = setting("take whole nodes", resume="free", default=True)
    options: list[SbatchOption] = setting(
        "further options of sbatch, such as --reservation=NAME", resume="free", default=[]
    )


class RedisConfig(Section):
    """A Redis that keeps the tables of Ray's head, so that the cluster outlives its head pod."""

    address: Text = setting("host:port", resume="free", pattern=r"^[^\s:/]+:\d+$")
    secret: Text | None = setting(
        "name of the secret that holds the password; none means no password", resume="free", default=None
    )
    key: Text = setting("key of the password in that secret", resume="free", default="password")


class VolumeConfig(Section):
    """A persistent volume claim, mounted on all pods."""

    claim: Text = setting("name of a claim that many nodes can write (ReadWriteMany)", resume="free", pattern=DNS_NAME)
    mount: MountPath = setting("absolute path in the containers", resume="free")


class KubernetesConfig(Section):
    """What KubeRay and the Kubernetes scheduler want to know."""

    namespace: Text = setting("namespace", resume="free", default="default", pattern=DNS_NAME)
    service_account: Text | None = setting("service account of the pods", resume="free", default=None)
    queue: Text | None = setting(
        "Kueue queue; the job starts suspended and Kueue starts it", resume="free", default=None
    )
    priority_class: Text | None = setting("priority class of all pods", resume="free", default=None)
    tolerations: list[Toleration] = setting(
        "taints that training pods stand, as kubectl taint writes them", resume="free", default=[]
    )
    node_selector: dict[str, Text] = setting("labels that training nodes must have", resume="free", default={})
    head_node_selector: dict[str, Text] = setting(
        "labels that the head's node must have, such as those of nodes that are never preempted",
        resume="free",
        default={},
    )
    head_cpus: PositiveInt = setting("CPU cores of the head pod", resume="free", default=4)
    head_memory: Bytes = setting("memory of the head pod", resume="free", default=16 * 2**30, ge=2**30)
    gpu_resource: Text = setting("resource that a GPU is", resume="free", default="nvidia.com/gpu")
    volumes: dict[str, VolumeConfig] = setting("volumes by name", resume="free", default={})
    secrets: list[Text] = setting(
        "secrets whose keys become environment variables, such as those of an object store", resume="free", default=[]
    )
    redis: RedisConfig | None = setting(
        "fault tolerance of Ray's head; none means a lost head pod starts a new cluster", resume="free", default=None
    )
    retries: Count = setting("new clusters after a lost one or a failed run", resume="free", default=10)
    pending_timeout_s: Seconds = setting("longest wait for the pods", resume="free", default=3600.0, ge=60)
    grace_s: Seconds = setting(
        "time of a pod that must go, for the last checkpoint", resume="free", default=300.0, ge=10
    )


class AwsLauncher(Section):
    """Ray's cluster launcher on EC2."""

    kind: Literal["aws"] = "aws"
    region: Text = setting("region", resume="free")
    zones: Text | None = setting("availability zones, comma-separated", resume="free", default=None)
    head_type: Text = setting("instance type of the head", resume="free", default="m6i.2xlarge")
    worker_type: Text = setting("instance type of the training nodes", resume="free")
    machine_image: Text = setting("AMI", resume="free", pattern=r"^ami-")
    user: Text = setting("user of the machine image", resume="free", default="ubuntu")
    spot: Flag = setting("training nodes on spare capacity, which can be taken away", resume="free", default=False)
    disk_gb: PositiveInt = setting("size of the system disk", resume="free", default=200)


class GcpLauncher(Section):
    """Ray's cluster launcher on Google's Compute Engine."""

    kind: Literal["gcp"] = "gcp"
    project: Text = setting("project id", resume="free")
    region: Text = setting("region", resume="free")
    zone: Text = setting("zone", resume="free")
    head_type: Text = setting("machine type of the head", resume="free", default="n2-standard-8")
    worker_type: Text = setting("machine type of the training nodes", resume="free")
    machine_image: Text = setting("URL of the disk image", resume="free")
    user: Text = setting("user of the machine image", resume="free", default="ubuntu")
    spot: Flag = setting("training nodes on spare capacity, which can be taken away", resume="free", default=False)
    disk_gb: PositiveInt = setting("size of the system disk", resume="free", default=200)


class HostsLauncher(Section):
    """Ray's cluster launcher on machines that are there, over ssh."""

    kind: Literal["hosts"] = "hosts"
    head: Text = setting("address of the head", resume="free")
    workers: list[Text] = setting("addresses of the training nodes besides the head", resume="free", default=[])
    user: Text = setting("user of ssh on all of them", resume="free")
    key: Text | None = setting("private key file of ssh; none means its default", resume="free", default=None)


LauncherConfig = Annotated[AwsLauncher | GcpLauncher | HostsLauncher, Field(discriminator="kind")]


class SkyPilotConfig(Section):
    """What SkyPilot wants to know."""

    infrastructure: Text | None = setting(
        "cloud, with region and zone if need be, such as aws/us-east-1; none lets SkyPilot choose",
        resume="free",
        default=None,
    )
    spot: Flag = setting("spare capacity, which can be taken away", resume="free", default=False)
    disk_gb: PositiveInt = setting("size of the system disk", resume="free", default=256)
    bucket: Text | None = setting(
        "URL of a bucket that is mounted at /runs, such as s3://NAME; none where cluster.nodes.home is a URL",
        resume="free",
        default=None,
        pattern=r"^[a-z0-9]+://",
    )


class ClusterTargets(Section):
    """The part of `cluster` that says where the run's machines come from."""

    nodes: NodesConfig | None = setting("what a node of the cluster is", resume="free", default=None)
    slurm: SlurmConfig | None = setting("cluster render slurm", resume="free", default=None)
    kubernetes: KubernetesConfig | None = setting("cluster render kuberay", resume="free", default=None)
    launcher: LauncherConfig | None = setting("cluster render ray", resume="free", default=None)
    skypilot: SkyPilotConfig | None = setting("cluster render skypilot", resume="free", default=None)
