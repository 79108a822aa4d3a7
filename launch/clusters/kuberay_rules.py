"""What KubeRay's operator refuses although its schema allows it. PURE.

Takes a manifest → problems in words. A manifest that breaks one of these is accepted by `kubectl apply` and then
never starts. Source: the rules of the operator's `validation.go` (KubeRay at commit feeaf72, 19 August 2026), in own
words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

LONGEST_NAME = {"RayJob": 47, "RayCluster": 63}  # generated names of pods and services must fit 63
_MODES = ("K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode")
_BY_HAND = ("RAY_REDIS_ADDRESS", "REDIS_PASSWORD")


def broken_rules(manifest: dict[str, Any]) -> list[str]:
    """Every broken rule as `<what>. <rule>. <remedy>`; other kinds of objects have none."""
    kind, spec = manifest.get("kind"), manifest.get("spec", {})
    if kind not in LONGEST_NAME:
        return []
    problems = list(_name_rules(str(kind), str(manifest.get("metadata", {}).get("name", ""))))
    if kind == "RayJob":
        problems += _job_rules(spec)
    problems += _cluster_rules(spec.get("rayClusterSpec", {}) if kind == "RayJob" else spec)
    return problems


def _name_rules(kind: str, name: str) -> Iterator[str]:
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > LONGEST_NAME[kind]:
        yield (
            f"metadata.name={name} is not the name of a {kind}. Pods and services are named after it: lower case, "
            f"digits and dashes, a letter first, at most {LONGEST_NAME[kind]} characters. Choose another name."
        )


def _job_rules(spec: dict[str, Any]) -> Iterator[str]:
    ends = bool(spec.get("shutdownAfterJobFinishes"))
    mode = spec.get("submissionMode", "K8sJobMode")
    if mode not in _MODES:
        yield f"spec.submissionMode={mode} is unknown. It is one of {', '.join(_MODES)}. Choose one."
    if spec.get("suspend") and not ends:
        yield "spec.suspend=true needs spec.shutdownAfterJobFinishes. Suspending deletes the cluster. Set it to true."
    if spec.get("ttlSecondsAfterFinished") and not ends:
        yield (
            "spec.ttlSecondsAfterFinished has no effect without spec.shutdownAfterJobFinishes. "
            "It is the time until the shutdown. Set spec.shutdownAfterJobFinishes=true."
        )
    if spec.get("backoffLimit") and (spec.get("clusterSelector") or mode == "InteractiveMode"):
        yield "spec.backoffLimit cannot be used here. A retry makes a new cluster. Remove clusterSelector."
    if mode == "SidecarMode":
        if any(spec.get(key) for key in ("submitterPodTemplate", "submitterConfig", "clusterSelector")):
            yield "spec.submissionMode=SidecarMode has no submitter pod. The head submits. Remove submitterConfig."
        head = _pod_spec(spec.get("rayClusterSpec", {}).get("headGroupSpec", {}))
        if head.get("restartPolicy", "Never") != "Never":
            yield "the head's restartPolicy must be Never in SidecarMode. The job would run twice. Remove it."
    if ends and spec.get("deletionStrategy", {}).get("deletionRules"):
        yield "spec.deletionStrategy.deletionRules excludes spec.shutdownAfterJobFinishes. Choose one of them."


def _cluster_rules(spec: dict[str, Any]) -> Iterator[str]:
    if spec.get("authOptions", {}).get("mode") == "token" and _version(spec.get("rayVersion", "")) < (2, 52):
        yield "spec.rayVersion is too old for authOptions.mode=token. Ray has tokens since 2.52. Use a newer image."
    groups = [("headGroupSpec", spec.get("headGroupSpec", {}))]
    groups += [(f"workerGroupSpecs.{g.get('groupName')}", g) for g in spec.get("workerGroupSpecs", [])]
    names = [group.get("groupName") for _, group in groups[1:]]
    if len(set(names)) != len(names):
        yield f"workerGroupSpecs share a name ({', '.join(map(str, names))}). Pods are counted by it. Rename one."
    for where, group in groups:
        yield from _group_rules(where, group, spec)
    for where, group in groups[1:]:
        least, most, wanted = (int(group.get(key) or 0) for key in ("minReplicas", "maxReplicas", "replicas"))
        if most < least or not least <= wanted <= most:
            yield f"{where}: replicas={wanted} is not within {least} and {most}. Set minReplicas and maxReplicas."


def _group_rules(where: str, group: dict[str, Any], spec: dict[str, Any]) -> Iterator[str]:
    parameters = group.get("rayStartParams", {})
    environment = {item.get("name") for item in _containers(group) for item in item.get("env", [])}
    if "labels" in parameters:
        yield f"{where}.rayStartParams.labels is refused. Labels are a field of the group. Use {where}.labels."
    if group.get("resources") and any(key in parameters for key in ("num-cpus", "num-gpus", "memory", "resources")):
        yield f"{where} gives resources twice. Either rayStartParams or resources holds. Remove one."
    by_hand = "redis-password" in parameters or any(name in environment for name in _BY_HAND)
    if spec.get("gcsFaultToleranceOptions") and by_hand:
        yield f"{where} sets Redis by hand. gcsFaultToleranceOptions does it. Remove the password and address."
    if spec.get("enableInTreeAutoscaling") and spec.get("autoscalerOptions", {}).get("version") == "v2":
        if _pod_spec(group).get("restartPolicy", "Never") != "Never":
            yield f"{where}: restartPolicy must be Never with autoscaler v2. It replaces pods itself. Remove it."
        if "RAY_enable_autoscaler_v2" in environment:
            yield f"{where}: RAY_enable_autoscaler_v2 is set twice. autoscalerOptions.version=v2 does it. Remove it."


def _pod_spec(group: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = group.get("template", {}).get("spec", {})
    return spec


def _containers(group: dict[str, Any]) -> list[dict[str, Any]]:
    return list(_pod_spec(group).get("containers", []))


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])
