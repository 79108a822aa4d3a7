"""A run whose controller is here and whose ranks are on several hosts, without Ray: the test plays the world."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch.controller.state import Stop
from launch.session import AGENT_SILENT_S
from pretrain.config import RunConfig
from pretrain.metrics.history import decode_records
from pretrain.rundir import RunDirectory
from tests.cluster.host_nodes import HostNodes
from tests.cluster.hosts import Hosts
from tests.launch.runs import RANK_COMMAND
from tests.launch.test_controller import Scene


class HostScene(Scene):
    """The scene of the controller's tests over real links, with a cluster's clocks."""

    silent_s = AGENT_SILENT_S
    one_host = False

    def __init__(self, hosts: Hosts, config: RunConfig, home: Path, command: Sequence[str]) -> None:
        self.config, self.command, self.address = config, command, hosts.gateway
        self.run, _ = RunDirectory.claim(config, resume="never", home=str(home))
        self.begin(HostNodes(hosts))

    def wait_for(self, what: Callable[[], Any], timeout_s: float = 100.0) -> Any:
        return super().wait_for(what, timeout_s)

    def steps(self, attempt: int) -> list[dict[str, object]]:
        """Records of finished steps of one attempt, oldest first."""
        path = Path(self.run.url) / "metrics" / f"attempt-{attempt:03d}.jsonl"
        return [record for record in decode_records(path.read_bytes()) if "loss" in record] if path.exists() else []

    def first_step_t(self, attempt: int) -> float:
        return float(str(self.wait_for(lambda: self.steps(attempt), 200.0)[0]["t"]))

    def of_attempt(self, attempt: int) -> dict[str, tuple[int, int]]:
        """Size and time of change of everything in the run's directory that an attempt wrote."""
        names = (f"a{attempt:03d}", f"attempt-{attempt:03d}")
        paths = [
            path for path in Path(self.run.url).rglob("*") if path.is_file() and any(n in str(path) for n in names)
        ]
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


@contextmanager
def host_scene(
    hosts: Hosts, config: RunConfig, home: Path, command: Sequence[str] = RANK_COMMAND
) -> Iterator[HostScene]:
    play = HostScene(hosts, config, home, command)
    try:
        yield play
    finally:
        if play.controller:
            play.controller.ask(Stop.NOW)
        play._thread.join(60.0)
        play.nodes.close()
        for host in range(1, hosts.count + 1):
            hosts.kill_processes(host)
            hosts.mend(host)
