"""A run that translates slowly is not taken for one that hangs."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.controller import hangs
from launch.controller.state import Beat, RankView, RunState
from tests.launch.test_policy import LIMITS
from tests.ranks import run_ranks
from tests.tiny import add_pairs, build_tiny
from tests.train.rank_programs import slow_translations

LEARNED = replace(LIMITS, learned_deadlines=True, heartbeat_timeout_s=60.0)


def test_slow_copies_and_slow_texts_are_told_and_no_rank_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each copy of the model takes 0.8 s, where losses take a hundredth, and the last texts 0.35 s a token.
    monkeypatch.setattr(hangs, "_DISK_SLACK_S", 0.4)
    tiny = build_tiny(tmp_path)
    pairs = [(f"the cat sees {number}", f"a dog finds {number}") for number in range(60)]
    add_pairs(tiny, pairs)
    held = tmp_path / "held.jsonl"
    held.write_text("".join(json.dumps({"source": a, "target": b}) + "\n" for a, b in pairs[:9]))
    run = tiny.encoder_decoder(
        *("name=slow", "schedule.total_steps=16", "eval.every_steps=1", "eval.translation.max_tokens=12"),
        *(f"eval.translation.pairs={held}", "eval.translation.every_steps=4", "checkpoint.every_steps=100"),
        f"data.validation.pairs.path={tmp_path / 'pairs'}",
        *(
            "eval.max_rows=2",
            'eval.samples.prompts=["the cat", "a dog"]',
            "eval.samples.every_steps=8",
            "eval.samples.max_tokens=2",
        ),
    )
    arguments = {"run": run, "home": str(tmp_path), "copy_s": 0.8, "token_s": 0.35, "slow_step": 16}
    results = run_ranks(slow_translations, ranks=2, arguments=arguments, timeout_s=150)
    assert [result.value["code"] for result in results] == [0, 0], results[0].output[-3000:]
    events = [(t, result.rank, *rest) for result in results for t, *rest in result.value["events"]]
    feeds = [[kind for _, rank, kind, *_ in events if rank == number] for number in (0, 1)]
    for kinds in feeds:
        assert kinds.count("feed") > 16
        assert not any(a == b == "feed" for a, b in itertools.pairwise(kinds))  # each token is told
    assert {beat[0] for _, _, kind, *beat in events if kind == "beat"} >= {
        "step",
        "eval",
        "translate",
        "sample",
        "save",
    }
    copies = [[rest[0] for _, rank, kind, *rest in events if (kind, rank) == ("copy", number)] for number in (0, 1)]
    assert copies == [["translate", "translate", "sample"] * 2, ["translate"] * 4]
    _no_rank_is_judged([(t, rank, *beat) for t, rank, kind, *beat in events if kind == "beat"])


def _no_rank_is_judged(beats: list[Any]) -> None:
    """Goes through the beats in the order of time and looks for a hang before each."""
    beats.sort(key=lambda beat: beat[0])
    began = beats[0][0]
    state = RunState(ranks={rank: RankView(began, began) for rank in (0, 1)})
    for t, rank, phase, step, collective in beats:
        fault = hangs.find_hang(state, t, LEARNED)
        assert fault is None or "in phase translate" not in fault.message  # a busy machine may stop in any phase
        view, times = hangs.hear(state.ranks[rank], Beat(rank, phase, step, collective, t), t, state.times)
        state = replace(state, ranks={**state.ranks, rank: view}, times=times)
    assert len(state.times.seconds["translate"]) >= 6  # so that deadlines were learned
