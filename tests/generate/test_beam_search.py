"""The paper's rule against a plain search without a cache, without an early stop, and without batches."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from pretrain.generate.beam import BeamOptions, beam_search
from pretrain.generate.decode import Begun, StopRule, begin_prompts, begin_sources
from pretrain.sequence import IGNORED_LABEL, Batch, SeqInfo
from tests.generate.test_transformers import START, TEXTS, ours

DEPTH = 11


@cache
def log_probabilities(name: str, text: tuple[int, ...], new: tuple[int, ...]) -> list[float]:
    """Of every next id, from one forward pass over the whole text."""
    ids, source = (text + new, None) if name == "decoder" else ((START, *new), torch.tensor(text))
    info = SeqInfo.from_lengths([len(ids)])
    source_info = None if source is None else SeqInfo.from_lengths([len(text)])
    batch = Batch(0, torch.tensor(ids), info, torch.full((len(ids),), IGNORED_LABEL), source, source_info, 0, 0, 0, 0)
    with torch.no_grad():
        scores: list[float] = torch.log_softmax(ours(name).logits(batch)[-1].double(), -1).tolist()
    return scores


def plain_search(name: str, text: list[int], num_beams: int, alpha: float, end: int) -> list[tuple[float, list[int]]]:
    """Scores and ids of what ended among the best `num_beams` of its step, or reached the limit there; best first.

    Wu et al. 2016: score = log P / ((5 + n) / 6)^alpha. It always goes to the limit, and forgets nothing it kept.
    """
    growing: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    kept: list[tuple[float, list[int]]] = []
    for length in range(1, DEPTH + 1):
        steps = [
            (total + score, (*ids, token))
            for total, ids in growing
            for token, score in enumerate(log_probabilities(name, tuple(text), ids))
        ]
        steps.sort(reverse=True)
        for total, ids in steps[:num_beams]:
            if ids[-1] == end or length == DEPTH:
                kept.append((total / ((5 + length) / 6) ** alpha, list(ids[:-1] if ids[-1] == end else ids)))
        growing = [step for step in steps if step[1][-1] != end][:num_beams]
    return sorted(kept, reverse=True)[:num_beams]


@pytest.mark.parametrize(("name", "end"), [("decoder", 24), ("decoder", 26), ("t5", 8)])
@pytest.mark.parametrize("num_beams", [2, 4])
def test_beams_of_the_papers_rule_are_those_of_a_plain_search(name: str, end: int, num_beams: int) -> None:
    model, stop = ours(name), StopRule(DEPTH, end)
    for alpha in (0.0, 0.6):
        options = BeamOptions(num_beams, alpha, "paper")
        begun: Any = (
            begin_prompts(model, TEXTS, DEPTH) if name == "decoder" else begin_sources(model, TEXTS, START, DEPTH)
        )
        found = beam_search(begun, options, stop)
        for text, beams in zip(TEXTS, found, strict=True):
            expected = plain_search(name, text, num_beams, alpha, end)
            assert [list(beam.ids) for beam in beams] == [ids for _, ids in expected]
            assert [beam.score for beam in beams] == pytest.approx([score for score, _ in expected], rel=1e-4)
            assert [beam.ended for beam in beams] == [len(ids) < DEPTH for _, ids in expected]


def test_these_searches_do_stop_early_and_do_leave_good_texts_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is compared above is what it is meant to be: without both, any search would pass."""
    fed: list[int] = []
    feed = Begun.feed

    def counted(self: Begun, ids: list[int]) -> None:
        fed.append(len(ids))
        feed(self, ids)

    monkeypatch.setattr(Begun, "feed", counted)
    stopped_early = pruned = 0
    for text in TEXTS:
        fed.clear()
        (two,) = beam_search(begin_prompts(ours("decoder"), [text], DEPTH), BeamOptions(2, 0.6), StopRule(DEPTH, 24))
        stopped_early += len(fed) < DEPTH - 1
        (many,) = beam_search(begin_prompts(ours("decoder"), [text], DEPTH), BeamOptions(60, 0.6), StopRule(DEPTH, 24))
        pruned += many[0].score > two[0].score + 1e-4
    assert stopped_early > 0
    assert pruned > 0
