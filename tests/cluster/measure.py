"""A run of three hosts, with real ranks of the smallest model: one loses power, another one is cut off. Needs root.

Takes a folder and more of the config → seconds from each fault to the next finished step, read from the copies that
the hosts keep of each other's memory. Three ranks, then two, then one, and three again if asked.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from pretrain.config import load_config
from tests.cluster.hosts import Hosts, missing
from tests.cluster.scene import HostScene, host_scene
from tests.tiny import Tiny, build_tiny

REAL_RANKS = (sys.executable, "-m", "pretrain")
THREE_RANKS = ("cluster.num_ranks=3", "batch.global_batch_size=6", "batch.micro_batch_size=1", "engine.zero_stage=2",
               "metrics.log_every_steps=1", "cluster.standbys=true")  # fmt: skip
_STEPS_BEFORE = 20  # so many steps train between two faults


def lose_hosts(folder: Path) -> dict[str, float]:
    """Seconds of `node_loss` and of `partition`.

    Raises:
        RuntimeError: this machine cannot make hosts; says what it lacks.
    """
    lacking = missing()
    if lacking:
        raise RuntimeError(lacking)
    folder.mkdir()
    hosts = Hosts(3)
    try:
        return lose_two(hosts, build_tiny(folder), folder, "schedule.total_steps=1e6")
    finally:
        hosts.close()


def lose_two(hosts: Hosts, tiny: Tiny, folder: Path, *overrides: str, and_back: bool = False) -> dict[str, float]:
    """The same on hosts that are up; the run is called `torn` and lies in `folder`.

    Args:
        and_back: both hosts come back then, and the run goes on to its end on three.

    Raises:
        RuntimeError: the run did not go on from the memory of its hosts.
    """
    words = tiny.decoder(
        "name=torn", *THREE_RANKS, "checkpoint.every_steps=100000", "checkpoint.ram_every_steps=2",
        "cluster.min_ranks=1", "cluster.backoff_s=0.1", *overrides,
    )  # fmt: skip
    seconds = {}
    with host_scene(hosts, load_config(words[0], words[1:]), folder, REAL_RANKS) as play:
        for attempt, (what, hurt) in enumerate((("node_loss", play.nodes.kill), ("partition", play.nodes.cut)), 1):
            _wait_until_it_trains(play, attempt)
            began = time.time()
            hurt(4 - attempt)
            seconds[what] = play.first_step_t(attempt + 1) - began
        restored = [event.fields["tier"] for event in play.events("restored")]
        if restored != ["memory", "memory"]:
            raise RuntimeError(f"the run went on from {restored}, not from the memory of its hosts")
        if and_back:
            play.nodes.back(2)
            play.nodes.back(3)
            play.first_step_t(4)
            play.end(240.0)
    return seconds


def _wait_until_it_trains(play: HostScene, attempt: int) -> None:
    play.wait_for(lambda: len(play.steps(attempt)) >= _STEPS_BEFORE, 200.0)
    play.wait_for(lambda: [e for e in play.events("standbys_ready") if e.fields["attempt"] == attempt], 200.0)
