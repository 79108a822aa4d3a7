"""A file for Ray's cluster launcher (`ray up`): AWS, GCP, or hosts that are there. PURE.

Takes a `Fleet` → YAML. Ray's token is the caller's `~/.ray/auth_token`, which the launcher copies to every node; the
dashboard stays on the loopback address of the head, so jobs are sent from there (`ray exec`) or through a tunnel.
"""

from __future__ import annotations

import base64
import shlex
from typing import Any

from launch.clusters.fleet import Fleet, dump, ray_version
from pretrain.errors import UserError

TOKEN_FILE = "~/.ray/auth_token"
_HEAD, _WORKER = "head", "ranks"


def render(fleet: Fleet) -> str:
    """The file. Raises UserError when the config has no `cluster.launcher`, or too few hosts."""
    launcher = fleet.config.cluster.launcher
    if launcher is None:
        raise UserError(
            "cluster.launcher is missing. Ray's launcher needs to know where. "
            "Set cluster.launcher.kind to aws, gcp or hosts."
        )
    if launcher.kind != "hosts" and "://" not in fleet.home:
        raise UserError(
            f"cluster.nodes.home={fleet.home} ends with the machines of {launcher.kind}. "
            "A run that outlives them needs an object store. Set cluster.nodes.home to a URL such as s3://bucket/runs."
        )
    if launcher.kind == "hosts":
        body = _on_hosts(fleet, launcher)
    else:
        body = _in_a_cloud(fleet, launcher)
    head = (
        f"# {fleet.title()}. Ray {ray_version()} on all nodes.\n"
        f"# Start:  pretrain cluster up CONFIG          (= ray up FILE, with a token in {TOKEN_FILE})\n"
        f"# Send:   ray exec FILE {shlex.quote(send_command(fleet))}\n"
        f"# End:    pretrain cluster down CONFIG\n"
    )
    return head + dump(body)


def _in_a_cloud(fleet: Fleet, launcher: Any) -> dict[str, Any]:
    aws = launcher.kind == "aws"
    if aws:
        provider = {"type": "aws", "region": launcher.region, "cache_stopped_nodes": False}
        provider |= {"availability_zone": launcher.zones} if launcher.zones else {}
    else:
        provider = {
            "type": "gcp",
            "region": launcher.region,
            "availability_zone": launcher.zone,
            "project_id": launcher.project,
        }
    machine = _aws_machine if aws else _gcp_machine
    slots = {"CPU": fleet.ray_cpus, **({"GPU": fleet.ray_gpus} if fleet.on_gpus else {})}
    return {
        "cluster_name": _cluster_name(fleet),
        "provider": provider,
        "auth": {"ssh_user": launcher.user},
        "max_workers": fleet.num_nodes,
        "idle_timeout_minutes": 30,
        "available_node_types": {
            _HEAD: {"resources": {"CPU": 0}, "node_config": machine(launcher, launcher.head_type, spot=False)},
            _WORKER: {
                "min_workers": fleet.num_nodes,
                "max_workers": fleet.num_nodes,
                "resources": slots,
                "node_config": machine(launcher, launcher.worker_type, spot=launcher.spot),
            },
        },
        "head_node_type": _HEAD,
        **_common(fleet, head_options="--num-cpus=0 --autoscaling-config=~/ray_bootstrap_config.yaml"),
    }


def _aws_machine(launcher: Any, instance_type: str, *, spot: bool) -> dict[str, Any]:
    disk = {"VolumeSize": launcher.disk_gb, "VolumeType": "gp3"}
    machine: dict[str, Any] = {
        "InstanceType": instance_type,
        "ImageId": launcher.machine_image,
        "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": disk}],
    }
    return machine | ({"InstanceMarketOptions": {"MarketType": "spot"}} if spot else {})


def _gcp_machine(launcher: Any, machine_type: str, *, spot: bool) -> dict[str, Any]:
    disk = {
        "boot": True,
        "autoDelete": True,
        "type": "PERSISTENT",
        "initializeParams": {"diskSizeGb": launcher.disk_gb, "sourceImage": launcher.machine_image},
    }
    machine: dict[str, Any] = {"machineType": machine_type, "disks": [disk]}
    scheduling: dict[str, Any] = {"onHostMaintenance": "TERMINATE"}
    if spot:
        scheduling |= {"preemptible": True, "automaticRestart": False}
    return machine | {"scheduling": [scheduling]}


def _on_hosts(fleet: Fleet, launcher: Any) -> dict[str, Any]:
    hosts = [launcher.head, *launcher.workers]
    if len(set(hosts)) != len(hosts):
        raise UserError(
            f"cluster.launcher.workers names a host twice, or the head ({', '.join(hosts)}). "
            "A host is one node. Remove the second."
        )
    if len(hosts) < fleet.num_nodes:
        raise UserError(
            f"cluster.launcher has {len(hosts)} hosts and the run needs {fleet.num_nodes} "
            f"(cluster.num_ranks={fleet.config.cluster.num_ranks}, cluster.nodes.ranks={fleet.slots}, "
            f"{fleet.spares} spare). The head trains too. Add workers or lower cluster.num_ranks."
        )
    provider = {"type": "local", "head_ip": launcher.head, "worker_ips": list(launcher.workers)}
    auth = {"ssh_user": launcher.user, **({"ssh_private_key": launcher.key} if launcher.key else {})}
    options = f"{_slots(fleet)} --autoscaling-config=~/ray_bootstrap_config.yaml"
    return {
        "cluster_name": _cluster_name(fleet),
        "provider": provider,
        "auth": auth,
        "max_workers": len(launcher.workers),
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 30,
        **_common(fleet, head_options=options),
    }


def _common(fleet: Fleet, *, head_options: str) -> dict[str, Any]:
    """Set-up and start of nodes; the token is a file of mode 0600 that the launcher copies to every node."""
    exports = " && ".join([*fleet.nodes.setup, *fleet.exports(), "export RAY_AUTH_MODE=token"])
    files = '{ ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)"; }'  # as many as the host allows, if fewer
    start = f"{exports} && {files} && ray start --disable-usage-stats"
    config = base64.b64encode(fleet.config_text().encode()).decode()
    common: dict[str, Any] = {
        "file_mounts": {TOKEN_FILE: TOKEN_FILE},
        "initialization_commands": [],
        "setup_commands": [f"chmod 600 {TOKEN_FILE}"],
        "head_setup_commands": [f"printf %s {config} | base64 -d > ~/{fleet.config.name}.yaml"],
        "head_start_ray_commands": ["ray stop", f"{start} --head --port=6379 {head_options}"],
        "worker_start_ray_commands": ["ray stop", f"{start} --address=$RAY_HEAD_IP:6379 {_slots(fleet)}"],
    }
    if fleet.nodes.image:
        common["docker"] = {
            "image": fleet.nodes.image,
            "container_name": "pretrain",
            "pull_before_run": True,
            "run_options": [f"--shm-size={fleet.shared_memory_bytes}", "--ulimit nofile=65536:65536"],
        }
    return common


def send_command(fleet: Fleet) -> str:
    """What is run on the head once it is up; it returns at once, and its keeper watches over the run."""
    words = [*fleet.nodes.setup, *fleet.exports(), "export RAY_AUTH_MODE=token"]
    return " && ".join([*words, f"pretrain submit ~/{fleet.config.name}.yaml --address auto --resume auto"])


def _slots(fleet: Fleet) -> str:
    options = f"--num-cpus={fleet.ray_cpus} --num-gpus={fleet.ray_gpus}"
    return f"{options} --object-store-memory={fleet.object_store_bytes}"


def _cluster_name(fleet: Fleet) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in fleet.config.name.lower())
