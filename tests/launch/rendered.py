"""Configs that say what a cluster is, for the tests of `pretrain cluster render`."""

from __future__ import annotations

import copy
from typing import Any

from launch.clusters.render import render
from pretrain.config import RunConfig, config_from_dict
from tests.config.base import values

IMAGE = "registry.example/pretrain@sha256:" + "0" * 64
GPU_NODE = {"ranks": 8, "cpus": 96, "memory": "1000GiB", "accelerator": "H100", "image": IMAGE}
CLUSTER: dict[str, Any] = {
    "num_ranks": 30,
    "min_ranks": 16,
    "device": "cuda",
    "nodes": {**GPU_NODE, "spares": 1, "home": "s3://bucket/runs", "interface": "eth0"},
    "slurm": {"time_limit_s": "25h", "partition": "gpu", "account": "team", "options": ["--reservation=august"]},
    "kubernetes": {
        "namespace": "training",
        "queue": "gpu-queue",
        "priority_class": "high",
        "tolerations": ["dedicated=training:NoSchedule", "spot"],
        "node_selector": {"cloud.example/pool": "h100"},
        "head_node_selector": {"lifecycle": "on-demand"},
        "service_account": "trainer",
        "secrets": ["s3-credentials"],
        "redis": {"address": "redis:6379", "secret": "redis"},
        "volumes": {"scratch": {"claim": "scratch", "mount": "/scratch"}},
    },
    "launcher": {"kind": "aws", "region": "us-east-1", "worker_type": "p5.48xlarge", "machine_image": "ami-0123"},
    "skypilot": {"infrastructure": "aws/us-east-1", "spot": True},
}
GCP = {
    "kind": "gcp",
    "project": "lab",
    "region": "us-central1",
    "zone": "us-central1-a",
    "worker_type": "a3-highgpu-8g",
    "machine_image": "projects/deeplearning-platform-release/global/images/family/common-cu128",
    "spot": True,
}
HOSTS = {"kind": "hosts", "head": "10.0.0.1", "workers": [f"10.0.0.{n}" for n in range(2, 6)], "user": "trainer"}


def config_with(**changes: Any) -> RunConfig:
    """The config; `a__b=value` changes `cluster.a.b`, None removes."""
    cluster = copy.deepcopy(CLUSTER)
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = cluster
        for part in parents:
            node = node[part]
        if value is None:
            node.pop(last)
        else:
            node[last] = value
    return config_from_dict({**values(), "cluster": cluster})


def rendered(kind: str, *, cluster: bool = False, **changes: Any) -> str:
    return render(kind, config_with(**changes), cluster=cluster)
