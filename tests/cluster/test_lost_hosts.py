"""Real ranks on three hosts: one loses power, one is cut off, both come back. No row is lost or read twice."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from pretrain.config import load_config
from pretrain.faults import VARIABLE
from pretrain.metrics.history import decode_records
from pretrain.rundir import RunDirectory
from tests.cluster.hosts import Hosts
from tests.cluster.measure import REAL_RANKS, THREE_RANKS, lose_two
from tests.cluster.scene import HostScene, host_scene
from tests.ranks import run_ranks
from tests.tiny import build_tiny, steps_of
from tests.train.rank_programs import trainings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 320


def test_hosts_that_are_lost_cut_and_come_back_cost_no_row_and_no_step_and_the_losses_are_the_untouched_runs(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = build_tiny(tmp_path)
    total = f"schedule.total_steps={STEPS}"
    untouched = {"runs": [tiny.decoder("name=untouched", *THREE_RANKS, total)], "home": str(tmp_path)}
    run_ranks(trainings, ranks=3, arguments=untouched, timeout_s=300)
    slower = [{"point": "step.begins", "do": "sleep:0.5", "rank": 0, "attempt": n, "times": STEPS} for n in (1, 2, 3)]
    (tmp_path / "slower.json").write_text(json.dumps(slower))  # the standbys shall be ready before the run is over
    monkeypatch.setenv(VARIABLE, str(tmp_path / "slower.json"))
    lose_two(hosts, tiny, tmp_path, total, and_back=True)
    run = RunDirectory.locate(str(tmp_path / "torn"))
    assert run.events()[-1].kind == "completed"
    assert [event.fields["ranks"] for event in run.events() if event.kind == "attempt_started"] == [3, 2, 1, 3]
    # The run grows right after a commit that is made for it: no step is done twice.
    metrics = tmp_path / "torn" / "metrics"
    alone, grown = (decode_records((metrics / f"attempt-{n:03d}.jsonl").read_bytes()) for n in (3, 4))
    last, first = [r["step"] for r in alone if "loss" in r][-1], next(r["step"] for r in grown if "loss" in r)
    assert first == last + 1
    whole, torn = steps_of(tmp_path / "untouched"), steps_of(tmp_path / "torn")
    assert sorted(torn) == sorted(whole) == list(range(1, STEPS + 1))
    assert [torn[step]["data_digest"] for step in whole] == [whole[step]["data_digest"] for step in whole]
    # Sums over 2 ranks and 1 round otherwise than over 3, and training makes the difference grow: 2e-5 after 200 steps.
    for step in whole:
        assert torn[step]["loss"] == pytest.approx(whole[step]["loss"], rel=1e-5 if step <= 100 else 1e-4), step


def test_a_first_rank_that_is_cut_off_in_its_saves_writes_nothing_once_others_have_taken_over(
    hosts: Hosts, tmp_path: Path
) -> None:
    """It lives on for some seconds, sees the run's directory, and would like to write its metrics and checkpoints."""
    tiny = build_tiny(tmp_path)
    words = tiny.decoder(
        "name=torn", *THREE_RANKS, "schedule.total_steps=1e6", "cluster.min_ranks=1", "cluster.backoff_s=0.1",
        "checkpoint.every_steps=1", "checkpoint.keep_last=100000",
    )  # fmt: skip
    with host_scene(hosts, load_config(words[0], words[1:]), tmp_path, REAL_RANKS) as play:
        play.wait_for(lambda: len(play.events("committed")) > 5, 200.0)
        first = play.pids(1)[0]
        (host,) = [host for host in (1, 2, 3) if first in hosts.pids(host)]
        cut_t = time.time()
        play.nodes.cut(host)
        play.wait_for(lambda: len(play.events("attempt_started")) == 2, 60.0)
        taken_over, alive = written_by_the_first(play), first in hosts.pids(host)
        assert [name for name in taken_over if "a001" in name]
        assert [name for name in taken_over if name.endswith("attempt-001.jsonl")]
        play.wait_for(lambda: not hosts.pids(host), 60.0)
        print(f"all of the cut host's processes were gone after {time.time() - cut_t:.1f} s")
        play.wait_for(lambda: len(play.steps(2)) > 20, 200.0)
        assert alive  # or there would have been nothing to keep from writing
        assert written_by_the_first(play) == taken_over
        assert play.steps(2)[0]["step"] <= play.steps(1)[-1]["step"] + 1


def written_by_the_first(play: HostScene) -> dict[str, tuple[int, int]]:
    """What attempt 1 has put into the run's directory; its logs apart, where it may say why it ends."""
    return {name: what for name, what in play.of_attempt(1).items() if "/logs/" not in name}
