"""Manifests for KubeRay: a RayJob that holds everything, or a RayCluster to submit to. PURE.

Takes a `Fleet` → a ConfigMap with the config, a budget against voluntary evictions, and the job. The head trains
nothing and asks for no GPU, so it can lie on a node that is never preempted. Each retry of a RayJob is a new cluster
that runs the same command, which goes on with the run. What only the operator checks is in `kuberay_rules`.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from launch.clusters.fleet import Fleet, dump, entry_command, ray_version, require_image
from launch.clusters.kuberay_rules import broken_rules
from pretrain.config.cluster_targets import KubernetesConfig
from pretrain.errors import ConfigError, UserError

CONFIG_FOLDER = "/etc/pretrain"
API_VERSION = "ray.io/v1"
# Told to go, the head asks the run to save and waits for it; its command then ends with 5 and the job is retried.
_SAVE = (
    "for p in /proc/[0-9]*; do if tr '\\0' ' ' < $p/cmdline 2> /dev/null | "
    "grep -q '^[^ ]*python[^ ]* [^ ]*pretrain submit .* --wait'; then kill -TERM \"${p#/proc/}\"; "
    "while grep -q . $p/cmdline 2> /dev/null; do sleep 1; done; fi; done"
)
_TAINT = re.compile(r"(?P<key>[^=:]+)(?:=(?P<value>[^:]*))?(?::(?P<effect>\w+))?")

Manifest = dict[str, Any]


def render(fleet: Fleet, kind: Literal["job", "cluster"] = "job") -> str:
    """The manifests as YAML documents, for `kubectl apply -f`.

    Raises:
        UserError: the config does not describe pods, or what it describes the operator would refuse.
    """
    kubernetes = fleet.config.cluster.kubernetes
    if kubernetes is None:
        raise UserError(
            "cluster.kubernetes is missing. Pods need a namespace. Set cluster.kubernetes.namespace, "
            "and cluster.kubernetes.volumes or a URL in cluster.nodes.home."
        )
    _check_home(fleet, kubernetes)
    documents = [_budget(fleet, kubernetes)]
    if kind == "job":
        documents = [_config_map(fleet, kubernetes), *documents, _job(fleet, kubernetes)]
    else:
        documents.append(_cluster(fleet, kubernetes))
    problems = [problem for document in documents for problem in broken_rules(document)]
    if problems:
        raise ConfigError(problems)
    head = f"# {fleet.title()}. Use it with: kubectl apply -f FILE\n"
    return head + "---\n".join(map(dump, documents))


def resource_name(fleet: Fleet) -> str:
    """The run's name as Kubernetes allows it: lower case, dashes, at most 40 characters, a letter first."""
    name = re.sub(r"[^a-z0-9]+", "-", fleet.config.name.lower()).strip("-")[:40].strip("-")
    return name if name[:1].isalpha() else f"run-{name}".rstrip("-")


def _check_home(fleet: Fleet, kubernetes: KubernetesConfig) -> None:
    mounts = [volume.mount.rstrip("/") for volume in kubernetes.volumes.values()]
    inside = any(fleet.home == mount or fleet.home.startswith(f"{mount}/") for mount in mounts)
    if "://" not in fleet.home and not inside:
        raise UserError(
            f"cluster.nodes.home={fleet.home} is in no volume ({', '.join(mounts) or 'there is none'}). "
            "A pod's own files end with it. Put it below cluster.kubernetes.volumes.NAME.mount, or set a URL."
        )


def _metadata(fleet: Fleet, kubernetes: KubernetesConfig) -> Manifest:
    return {
        "name": resource_name(fleet),
        "namespace": kubernetes.namespace,
        "labels": {"app.kubernetes.io/name": "pretrain", "app.kubernetes.io/instance": resource_name(fleet)},
    }


def _config_map(fleet: Fleet, kubernetes: KubernetesConfig) -> Manifest:
    metadata = _metadata(fleet, kubernetes)
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"run.yaml": fleet.config_text()}}


def _budget(fleet: Fleet, kubernetes: KubernetesConfig) -> Manifest:
    """Whoever drains nodes takes one at a time."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(fleet, kubernetes),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": {"app.kubernetes.io/instance": resource_name(fleet)}},
        },
    }


def _job(fleet: Fleet, kubernetes: KubernetesConfig) -> Manifest:
    metadata = _metadata(fleet, kubernetes)
    spec: Manifest = {
        # Stopped on request (4) is an end, not a failure to retry.
        "entrypoint": f"sh -c '{entry_command(f'{CONFIG_FOLDER}/run.yaml')} || test $? -eq 4'",
        "submissionMode": "K8sJobMode",
        "backoffLimit": kubernetes.retries,
        "submitterConfig": {"backoffLimit": 3},
        "preRunningDeadlineSeconds": int(kubernetes.pending_timeout_s),
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 600,
        "rayClusterSpec": _cluster_spec(fleet, kubernetes, with_config=True),
    }
    if kubernetes.queue:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = kubernetes.queue
        spec["suspend"] = True
    return {"apiVersion": API_VERSION, "kind": "RayJob", "metadata": metadata, "spec": spec}


def _cluster(fleet: Fleet, kubernetes: KubernetesConfig) -> Manifest:
    metadata = _metadata(fleet, kubernetes)
    if kubernetes.queue:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = kubernetes.queue
    spec = _cluster_spec(fleet, kubernetes, with_config=False)
    return {"apiVersion": API_VERSION, "kind": "RayCluster", "metadata": metadata, "spec": spec}


def _cluster_spec(fleet: Fleet, kubernetes: KubernetesConfig, *, with_config: bool) -> Manifest:
    spec: Manifest = {
        "rayVersion": ray_version(),
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": False,
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "num-gpus": "0", "dashboard-host": "0.0.0.0"},
            "template": _pod(fleet, kubernetes, head=True, with_config=with_config),
        },
        "workerGroupSpecs": [
            {
                "groupName": "ranks",
                "replicas": fleet.num_nodes,
                "minReplicas": fleet.num_nodes,
                "maxReplicas": fleet.num_nodes,
                "numOfHosts": 1,
                "rayStartParams": {
                    "num-cpus": str(fleet.ray_cpus),
                    "num-gpus": str(fleet.ray_gpus),
                    "object-store-memory": str(fleet.object_store_bytes),
                },
                "template": _pod(fleet, kubernetes, head=False, with_config=False),
            }
        ],
    }
    redis = kubernetes.redis
    if redis is not None:
        options: Manifest = {"redisAddress": redis.address, "externalStorageNamespace": resource_name(fleet)}
        if redis.secret:
            options["redisPassword"] = {"valueFrom": {"secretKeyRef": {"name": redis.secret, "key": redis.key}}}
        spec["gcsFaultToleranceOptions"] = options
    return spec


def _pod(fleet: Fleet, kubernetes: KubernetesConfig, *, head: bool, with_config: bool) -> Manifest:
    mounts = [{"name": name, "mountPath": volume.mount} for name, volume in kubernetes.volumes.items()]
    volumes: list[Manifest] = [
        {"name": name, "persistentVolumeClaim": {"claimName": volume.claim}}
        for name, volume in kubernetes.volumes.items()
    ]
    mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    memory = kubernetes.head_memory // 4 if head else fleet.shared_memory_bytes
    volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(memory)}})
    if with_config:
        mounts.append({"name": "config", "mountPath": CONFIG_FOLDER})
        volumes.append({"name": "config", "configMap": {"name": resource_name(fleet)}})
    spec: Manifest = {
        "terminationGracePeriodSeconds": int(kubernetes.grace_s),
        "containers": [_container(fleet, kubernetes, mounts, head=head)],
        "volumes": volumes,
    }
    spec |= {"serviceAccountName": kubernetes.service_account} if kubernetes.service_account else {}
    spec |= {"priorityClassName": kubernetes.priority_class} if kubernetes.priority_class else {}
    selector = kubernetes.head_node_selector if head else kubernetes.node_selector
    spec |= {"nodeSelector": dict(selector)} if selector else {}
    tolerations = [] if head else [_toleration(text) for text in kubernetes.tolerations]
    if fleet.on_gpus and not head and not any(item["key"] == kubernetes.gpu_resource for item in tolerations):
        tolerations.append({"key": kubernetes.gpu_resource, "operator": "Exists", "effect": "NoSchedule"})
    spec |= {"tolerations": tolerations} if tolerations else {}
    return {"metadata": {"labels": {"app.kubernetes.io/instance": resource_name(fleet)}}, "spec": spec}


def _container(fleet: Fleet, kubernetes: KubernetesConfig, mounts: list[Manifest], *, head: bool) -> Manifest:
    cpus = kubernetes.head_cpus if head else fleet.nodes.cpus
    resources = {"cpu": str(cpus), "memory": str(kubernetes.head_memory if head else fleet.nodes.memory)}
    if fleet.on_gpus and not head:
        resources[kubernetes.gpu_resource] = str(fleet.slots)
    container: Manifest = {
        "name": "ray-head" if head else "ray-worker",
        "image": require_image(fleet, "KubeRay"),
        "env": [{"name": name, "value": value} for name, value in fleet.environment().items()],
        "resources": {"limits": resources, "requests": dict(resources)},
        "volumeMounts": mounts,
    }
    if kubernetes.secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in kubernetes.secrets]
    if head:
        names = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080}
        container["ports"] = [{"containerPort": port, "name": name} for name, port in names.items()]
        container["lifecycle"] = {"preStop": {"exec": {"command": ["/bin/sh", "-c", _SAVE]}}}
    return container


def _toleration(text: str) -> Manifest:
    """`key=value:effect` as kubectl writes taints; without a value any value is stood, without an effect any effect."""
    match = _TAINT.fullmatch(text)
    assert match, text  # the schema has checked it
    toleration: Manifest = {"key": match["key"], "operator": "Exists" if match["value"] is None else "Equal"}
    toleration |= {"value": match["value"]} if match["value"] is not None else {}
    return toleration | ({"effect": match["effect"]} if match["effect"] else {})
