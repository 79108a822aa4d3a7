"""`pretrain doctor --address …`: the checks of a machine on every node of a Ray cluster, and those between nodes.

Takes an address → findings named by node: versions that differ, clocks that differ, a run directory that not all
nodes share, slots that compute wrong or slowly. Holds every free slot of the cluster for the few seconds of the probe.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import uuid
from dataclasses import replace
from typing import Any

from launch.doctor_machine import (
    Finding,
    check_compiler,
    check_file_limits,
    check_home,
    check_interface,
    check_names,
    check_packages,
    check_shared_memory,
    skew_finding,
)
from launch.doctor_slots import judge
from launch.slot_probe import run_probe
from pretrain.errors import PretrainError, UserError
from pretrain.rundir import home_url
from pretrain.store import open_store

WITHIN_S = 120.0


def examine_node(home: str, marker: str) -> dict[str, Any]:
    """On a node: its findings that are not ok, what others compare, whether it sees the marker in the runs' home."""
    checks = [check_packages, check_compiler, check_shared_memory, check_file_limits, check_names, check_interface]
    findings = [finding for check in [*checks, lambda: check_home(home)] for finding in check()]
    own = f"{marker}-{uuid.uuid4().hex}"
    try:
        store = open_store(home)
        sees = store.exists(marker)
        store.put(own, b"node")
    except (PretrainError, OSError):
        sees, own = False, ""
    import torch

    return {
        "host": socket.gethostname(),
        "findings": [finding for finding in findings if finding.verdict != "ok"],
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
        "t": time.time(),
        "sees_marker": sees,
        "marker": own,
    }


class Slot:
    """An actor on one slot."""

    def place(self) -> tuple[str, int]:
        """Address of this node and a free port of it."""
        import ray

        address = ray.util.get_node_ip_address()
        with socket.create_server((address, 0)) as server:
            return address, int(server.getsockname()[1])

    def probe(self, rank: int, size: int, master: tuple[str, int], device: str) -> dict[str, Any]:
        return run_probe(rank, size, master, device)


def check_cluster(address: str, device: str) -> list[Finding]:
    """All findings of a cluster. Raises UserError when it cannot be reached."""
    if address == "local" or not address.strip():  # with these Ray starts a cluster of its own, which is always fine
        raise UserError(
            f"--address={address} names no cluster. It must be a running Ray: HOST:6379 or auto. Correct it."
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    try:
        ray.init(address=address, namespace="pretrain-doctor", log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # Ray raises many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"--address={address} does not answer: {reason}. It must be a running Ray (HOST:6379 or auto). "
            "Correct it, and set RAY_AUTH_MODE and RAY_AUTH_TOKEN as the cluster has them."
        ) from None
    try:
        return _nodes(ray) + _slots(ray, device)
    finally:
        ray.shutdown()


def _nodes(ray: Any) -> list[Finding]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    home, marker = home_url(), f".doctor-{uuid.uuid4().hex}"
    store = open_store(home)
    store.put(marker, b"driver")
    try:
        examine, calls = ray.remote(examine_node), {}
        for node in [node for node in ray.nodes() if node["Alive"]]:
            where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            call = examine.options(num_cpus=0, scheduling_strategy=where).remote(home, marker)
            calls[call] = f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})", time.time()
        answers = _answers(ray, calls)
        return compare_nodes(answers, lambda key: bool(key) and store.exists(key))
    finally:
        for key in store.names():
            if key.startswith(marker):
                store.delete(key)


def _answers(ray: Any, calls: dict[Any, tuple[str, float]]) -> dict[str, tuple[float, float, dict[str, Any]]]:
    """(asked at, answered at, answer) by node of calls that are under way; an answer may be an error."""
    answers: dict[str, tuple[float, float, dict[str, Any]]] = {}
    deadline, left = time.monotonic() + WITHIN_S, list(calls)
    while left:  # one at a time: when an answer came bounds the clock of its node
        ready, left = ray.wait(left, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        done, left = (ready, left) if ready else (left, [])
        for call in done:
            node, asked = calls[call]
            try:
                answer = ray.get(call, timeout=0)
            except Exception as error:
                answer = {"error": why(error)}
            answers[node] = (asked, time.time(), answer)
    return {node: answers[node] for node, _ in calls.values()}


def why(error: Exception) -> str:
    """The error of a remote call in a line: what was raised over there, not the line that says where."""
    from ray.exceptions import GetTimeoutError, RayTaskError

    if isinstance(error, GetTimeoutError):
        return f"no answer within {WITHIN_S:g} s"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return (lines[-1] if isinstance(error, RayTaskError) else lines[0]).strip()


def compare_nodes(answers: dict[str, tuple[float, float, dict[str, Any]]], exists: Any) -> list[Finding]:
    """Findings of the nodes' answers: (asked at, answered at, answer) by node. PURE but for `exists`."""
    findings: list[Finding] = []
    versions: dict[str, dict[str, str]] = {}
    for node, (asked, answered, answer) in answers.items():
        if "error" in answer:
            findings.append(Finding(node, "bad", answer["error"], "this node cannot run a task"))
            continue
        versions[node] = answer["versions"]
        findings += [replace(finding, check=f"{node} {finding.check}") for finding in answer["findings"]]
        # Its clock was read between the question and the answer.
        skew_s = min(0.0, answer["t"] - asked) + max(0.0, answer["t"] - answered)
        finding = skew_finding(f"{node} clock", skew_s, "the clock here")
        findings += [finding] if finding.verdict != "ok" else []
        if not answer["sees_marker"] or not exists(answer["marker"]):
            found = "its files are not seen here, or those from here not there"
            remedy = "PRETRAIN_HOME must be one shared directory, or a URL"
            findings.append(Finding(f"{node} run directory", "bad", found, remedy))
    for name in ("python", "torch"):
        kinds = {node: found[name] for node, found in versions.items()}
        if len(set(kinds.values())) > 1:
            listed = ", ".join(f"{node} {version}" for node, version in kinds.items())
            findings.append(Finding(f"{name} of all nodes", "bad", listed, "install one version everywhere"))
    return findings or [Finding("nodes", "ok", f"{len(answers)} nodes agree in versions, clock and run directory")]


def _slots(ray: Any, device: str) -> list[Finding]:
    resource = "GPU" if device == "cuda" else "CPU"
    count = int(ray.available_resources().get(resource, 0))
    if count == 0:
        return [Finding("slots", "note", f"no free {resource} in the cluster", "the slots are not probed")]
    options = {"num_gpus": 1, "num_cpus": 0} if device == "cuda" else {"num_cpus": 1}
    actors = [ray.remote(Slot).options(**options).remote() for _ in range(count)]
    try:
        try:
            places = ray.get([actor.place.remote() for actor in actors], timeout=WITHIN_S)
        except Exception as error:  # slots that others took meanwhile, nodes that went
            found = f"{count} slots were free and are not to be had: {why(error)}"
            return [Finding("slots", "note", found, "try again when the cluster is idle; the slots were not probed")]
        calls = [actor.probe.remote(rank, count, places[0], device) for rank, actor in enumerate(actors)]
        ready, _ = ray.wait(calls, num_returns=count, timeout=WITHIN_S)
        results: dict[str, dict[str, Any] | None] = {}
        for rank, call in enumerate(calls):
            name = f"slot {rank} on {places[rank][0]}"
            try:
                results[name] = ray.get(call, timeout=0.1) if call in ready else None
            except Exception:
                results[name] = None
        return judge(results)
    finally:
        for actor in actors:
            ray.kill(actor)
