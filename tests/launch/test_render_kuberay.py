"""KubeRay's manifests: strict against the operator's own schema (tests/launch/crds) and against its further rules."""

from __future__ import annotations

import copy
import functools
import gzip
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from launch.clusters import kuberay_rules
from launch.clusters.kuberay_rules import broken_rules
from pretrain.config import load_config
from pretrain.errors import UserError
from tests.launch.rendered import IMAGE, config_with, rendered

CRDS = Path(__file__).with_name("crds")
KUBERNETES = "1.37"


def strict(schema: Any) -> Any:
    """A structural schema as the API server reads it with strict field validation.

    Unknown fields are errors where fields are listed; int-or-string and nullable are types; a required field with a
    default may be left out.
    """
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: strict(value) for key, value in schema.items()}
    if result.get("x-kubernetes-int-or-string"):
        result.pop("anyOf", None)
        result["type"] = ["integer", "string"]
    if result.get("nullable") and isinstance(result.get("type"), str):
        result["type"] = [result["type"], "null"]
    if isinstance(result.get("required"), list):
        defaults = schema.get("properties", {})
        result["required"] = [name for name in result["required"] if "default" not in defaults.get(name, {})]
    listed = isinstance(result.get("properties"), dict) and "additionalProperties" not in result
    if listed and not result.get("x-kubernetes-preserve-unknown-fields"):
        result["additionalProperties"] = False
    return result


@functools.cache
def validator(kind: str) -> jsonschema.Draft202012Validator:
    plural = {"RayJob": "rayjobs", "RayCluster": "rayclusters"}[kind]
    crd = json.loads(gzip.decompress((CRDS / f"ray.io_{plural}.json.gz").read_bytes()))
    (version,) = [version for version in crd["spec"]["versions"] if version["name"] == "v1"]
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


def documents(text: str) -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def problems(manifest: dict[str, Any]) -> list[str]:
    return [
        f"{'/'.join(map(str, e.absolute_path))}: {e.message}" for e in validator(manifest["kind"]).iter_errors(manifest)
    ]


CHANGES: list[dict[str, Any]] = [
    {},
    {"kubernetes__queue": None, "kubernetes__redis": None, "kubernetes__secrets": []},
    {"device": "cpu", "nodes__home": "/scratch/runs", "kubernetes__tolerations": []},
]


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("kind", ["RayJob", "RayCluster"])
def test_manifests_pass_the_operators_schema(kind: str, changes: dict[str, Any]) -> None:
    found = documents(rendered("kuberay", cluster=kind == "RayCluster", **changes))
    assert problems(found[kind]) == []
    assert set(found) == {"PodDisruptionBudget", kind} | ({"ConfigMap"} if kind == "RayJob" else set())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.submissionMode", 5),
        ("spec.backofLimit", 3),
        ("spec.backoffLimit", "three"),
        ("spec.rayClusterSpec.workerGroupSpecs.0.template.spec.tolerations", [{"key": "a", "effekt": "NoSchedule"}]),
        ("spec.rayClusterSpec.authOptions.mode", "none"),
    ],
)
def test_the_schema_would_find_a_mistake(path: str, value: Any) -> None:
    job = documents(rendered("kuberay"))["RayJob"]
    *parents, last = path.split(".")
    node: Any = job
    for part in parents:
        node = node[int(part)] if part.isdigit() else node[part]
    node[last] = value
    assert problems(job) != []


def test_schema_and_further_rules_are_those_of_one_version_of_the_operator() -> None:
    texts = ((CRDS / "README.md").read_text(), str(kuberay_rules.__doc__))
    first, second = (re.findall(r"commit (\w{7})", " ".join(text.split())) for text in texts)
    assert first == second != []


def core_objects(text: str) -> dict[str, dict[str, Any]]:
    """What Kubernetes itself reads of the manifests: its own kinds, and the pods that the operator makes."""
    found = documents(text)
    ray = found.pop("RayJob", None) or found.pop("RayCluster")
    cluster = ray["spec"].get("rayClusterSpec", ray["spec"])
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        name = group.get("groupName", "head")
        metadata = {"name": name, **group["template"].get("metadata", {})}
        found[name] = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": group["template"]["spec"]}
    return found


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("cluster", [False, True])
def test_config_map_budget_and_pods_pass_kubernetes_own_schema(cluster: bool, changes: dict[str, Any]) -> None:
    found = core_objects(rendered("kuberay", cluster=cluster, **changes))
    assert set(found) == {"PodDisruptionBudget", "head", "ranks"} | (set() if cluster else {"ConfigMap"})
    for manifest in found.values():
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    selected = found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]
    for pod in ("head", "ranks"):
        assert selected.items() <= found[pod]["metadata"]["labels"].items(), "the budget does not hold for this pod"


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("ConfigMap", "data", {"run.yaml": 5}),
        ("ConfigMap", "dta", {}),
        ("PodDisruptionBudget", "spec.maxUnavailable", [1]),
        ("PodDisruptionBudget", "spec.selektor", {}),
        ("PodDisruptionBudget", "apiVersion", "policy/v1beta1"),
        ("head", "spec.containers.0.lifecycle.preStop.exec.command", "sh"),
        ("head", "spec.containers.0.ports.0.containerPort", "6379"),
        ("ranks", "spec.volumes.0.emptyDir", "Memory"),
    ],
)
def test_kubernetes_own_schema_would_find_a_mistake(name: str, path: str, value: Any) -> None:
    manifest = core_objects(rendered("kuberay"))[name]
    *parents, last = path.split(".")
    node: Any = manifest
    for part in parents:
        node = node[int(part)] if part.isdigit() else node[part]
    node[last] = value
    with pytest.raises((kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError)):
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_pods_ask_for_what_the_config_says() -> None:
    job = documents(rendered("kuberay"))["RayJob"]
    cluster = job["spec"]["rayClusterSpec"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (5, 5, 5)
    pod = workers["template"]["spec"]
    container = pod["containers"][0]
    assert container["resources"]["limits"] == container["resources"]["requests"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert container["resources"]["limits"]["memory"] == str(1000 * 2**30)
    assert container["image"] == IMAGE
    shm = next(volume for volume in pod["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": str(250 * 2**30)}
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert {"key": "dedicated", "operator": "Equal", "value": "training", "effect": "NoSchedule"} in pod["tolerations"]
    assert {"key": "spot", "operator": "Exists"} in pod["tolerations"]
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    assert pod["priorityClassName"] == "high"
    assert pod["terminationGracePeriodSeconds"] == 300
    assert pod["nodeSelector"] == {"cloud.example/pool": "h100"}
    leader = head["template"]["spec"]
    assert head["rayStartParams"]["num-cpus"] == "0"  # no rank on the head
    assert "nvidia.com/gpu" not in leader["containers"][0]["resources"]["limits"]
    assert leader["nodeSelector"] == {"lifecycle": "on-demand"}
    assert "tolerations" not in leader
    assert cluster["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]["secretKeyRef"]["key"] == "password"
    assert cluster["authOptions"] == {"mode": "token"}


def test_the_job_mounts_the_config_that_its_command_names(tmp_path: Path) -> None:
    found = documents(rendered("kuberay"))
    job = found["RayJob"]["spec"]
    assert "pretrain submit /etc/pretrain/run.yaml --address auto --resume auto --wait" in job["entrypoint"]
    pod = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert {"name": "config", "mountPath": "/etc/pretrain"} in pod["containers"][0]["volumeMounts"]
    assert {"name": "config", "configMap": {"name": "tiny"}} in pod["volumes"]
    (tmp_path / "run.yaml").write_text(found["ConfigMap"]["data"]["run.yaml"])
    assert load_config(tmp_path / "run.yaml", check_files=False) == config_with()
    assert job["suspend"] is True
    assert found["RayJob"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu-queue"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"nodes__image": None}, "cluster.nodes.image is missing"),
        ({"nodes__image": "registry.example/pretrain"}, "can change between two starts"),
        ({"nodes__image": "registry.example:5000/pretrain:latest"}, "can change between two starts"),
        ({"nodes__home": "/runs"}, "is in no volume"),
        ({"nodes__home": None}, "cluster.nodes.home is missing"),
    ],
)
def test_pods_that_could_not_run_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        rendered("kuberay", **changes)


def test_names_that_kubernetes_does_not_allow_become_ones_that_it_does() -> None:
    from launch.clusters.fleet import fleet_of
    from launch.clusters.kuberay import resource_name

    for name, expected in {"Llama_8B.v2": "llama-8b-v2", "1st": "run-1st", "a" * 90: "a" * 40}.items():
        config = config_with().model_copy(update={"name": name})
        assert resource_name(fleet_of(config, kind="kuberay")) == expected


BROKEN: list[tuple[str, Any, str]] = [
    ("metadata.name", "Upper", "metadata.name=Upper"),
    ("metadata.name", "a" * 48, "at most 47"),
    ("spec.shutdownAfterJobFinishes", False, "spec.suspend=true needs"),
    ("spec.clusterSelector", {"ray.io/cluster": "x"}, "spec.backoffLimit cannot be used"),
    ("spec.submissionMode", "SidecarMode", "no submitter pod"),
    ("spec.submissionMode", "K8sMode", "spec.submissionMode=K8sMode is unknown"),
    ("spec.deletionStrategy", {"deletionRules": [{}]}, "excludes spec.shutdownAfterJobFinishes"),
    ("spec.rayClusterSpec.rayVersion", "2.51.0", "tokens since 2.52"),
    ("spec.rayClusterSpec.workerGroupSpecs.0.maxReplicas", 2, "is not within"),
    ("spec.rayClusterSpec.workerGroupSpecs.0.rayStartParams.labels", "a=b", "labels is refused"),
    ("spec.rayClusterSpec.headGroupSpec.rayStartParams.redis-password", "x", "sets Redis by hand"),
    ("spec.rayClusterSpec.headGroupSpec.resources", {"CPU": "1"}, "resources twice"),
]


@pytest.mark.parametrize(("path", "value", "text"), BROKEN, ids=[path for path, _, _ in BROKEN])
def test_each_rule_of_the_operator_finds_its_mistake(path: str, value: Any, text: str) -> None:
    job = copy.deepcopy(documents(rendered("kuberay"))["RayJob"])
    assert broken_rules(job) == []
    *parents, last = path.split(".")
    node: Any = job
    for part in parents:
        node = node[int(part)] if part.isdigit() else node[part]
    node[last] = value
    found = broken_rules(job)
    assert any(text in problem for problem in found), found


def test_the_preparation_for_the_end_of_a_head_signals_the_command_that_waits_and_nothing_else(tmp_path: Path) -> None:
    """Its preStop hook, run as written beside a process that looks like the command, and one that does not."""
    job = documents(rendered("kuberay"))["RayJob"]["spec"]
    container = job["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    script = tmp_path / "pretrain"
    script.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(5)))\n"
        "print('ready', flush=True)\ntime.sleep(60)\n"
    )
    started = [
        subprocess.Popen(["python3", str(script), *words], stdout=subprocess.PIPE)
        for words in (["submit", "x.yaml", "--resume", "auto", "--wait"], ["train", "x.yaml"])
    ]
    try:
        assert all(process.stdout and process.stdout.readline() == b"ready\n" for process in started)
        subprocess.run(command, check=True, timeout=30)
        assert [process.poll() for process in started] == [5, None]  # it waited for the first
    finally:
        for process in started:
            process.kill()
            process.communicate()
