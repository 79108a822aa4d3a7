"""Three hosts of one rank each, over real links and without Ray: one dies, comes back, another one is cut off.

What the controller does about it, with ranks that train nothing; `test_lost_hosts` is the same with ranks that train.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.scene import HostScene, host_scene
from tests.launch.runs import config_for

pytestmark = pytest.mark.timeout(300)


def start_of(play: HostScene, attempt: int) -> dict[str, object]:
    started = [event.fields for event in play.events("attempt_started") if event.fields["attempt"] == attempt]
    return started[0]


def test_a_dead_host_shrinks_the_run_its_return_grows_it_and_a_cut_one_writes_nothing_more(
    hosts: Hosts, tmp_path: Path
) -> None:
    fake = {"steps": 100_000, "step_s": 0.05, "commit_every": 20}
    config = config_for(tmp_path, fake=fake, num_ranks=3, min_ranks=1)
    with host_scene(hosts, config, tmp_path / "home") as play:
        ranks = play.pids(1)
        assert sorted(host for pid in ranks.values() for host in (1, 2, 3) if pid in hosts.pids(host)) == [1, 2, 3]
        memories = [os.stat(f"/proc/{pid}/root/dev/shm").st_dev for pid in ranks.values()]
        assert len({*memories, os.stat("/dev/shm").st_dev}) == 4  # each its own, gone with the last process of its host
        play.wait_for(lambda: play.events("committed"), 60.0)

        killed_t = time.time()
        play.nodes.kill(3)
        node_loss_s = play.first_step_t(2) - killed_t
        assert start_of(play, 2)["ranks"] == 2
        (fault,) = play.events("fault")
        assert (fault.fields["cause"], "node node3 is lost" in fault.fields["message"]) == ("node", True)

        play.nodes.back(3)
        play.first_step_t(3)
        assert start_of(play, 3)["ranks"] == 3
        assert "there are slots for 3 ranks, 2 ran" in str(start_of(play, 3)["why"])
        moved = play.steps(2)[-1]["step"]  # the last step of two ranks was committed, and none is done twice
        assert play.events("restored")[-1].fields["step"] == moved
        assert play.steps(3)[0]["step"] == int(str(moved)) + 1

        (pid,) = [pid for pid in play.pids(3).values() if pid in hosts.pids(2)]
        cut_t = time.time()
        play.nodes.cut(2)
        partition_s = play.first_step_t(4) - cut_t
        while psutil.pid_exists(pid):
            assert time.time() - cut_t < 40.0  # 10 s on idle cores
            time.sleep(0.05)
        dead_s = time.time() - cut_t
        written = play.of_attempt(3)
        play.wait_for(lambda: len(play.steps(4)) > 20)
        assert play.of_attempt(3) == written
        assert start_of(play, 4)["ranks"] == 2
    assert [event.fields["cause"] for event in play.events("fault")] == ["node", "node"]
    assert all(hosts.pids(host) == [] for host in (1, 2, 3))
    print(
        f"a lost host: {node_loss_s:.1f} s to the next step, a cut one: {partition_s:.1f} s, dead after {dead_s:.1f} s"
    )
    assert max(node_loss_s, partition_s) < 40.0  # 3.5 s on idle cores
