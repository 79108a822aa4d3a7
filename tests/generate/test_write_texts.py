"""Many texts at once, regrouped by length: each as if it were alone, in its place, with its own seed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from torch import nn

from pretrain.data.tokenizer import Tokenizer, train_bpe
from pretrain.generate.beam import BeamOptions, beam_search
from pretrain.generate.decode import Begun
from pretrain.generate.sampling import SamplingOptions
from pretrain.generate.text import Writer, generate_text, write_texts
from pretrain.model.registry import build_model
from tests.generate.test_text import _config

NUM_TEXTS, MAX_TOKENS = 70, 8


@pytest.fixture(scope="module", params=["decoder", "encoder_decoder"])
def writer(request: pytest.FixtureRequest) -> Writer:
    tokenizer: Tokenizer = train_bpe(["the cat sat on the mat, the dog sat on the log"] * 3, 270)
    config = _config(request.param, tokenizer.vocabulary_size)
    model: nn.Module = build_model(config.model, config.loss, seed=1, activation_checkpointing=False)
    return Writer(model, config.model, tokenizer, config.objective)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    draw = random.Random(3)
    words = ["the", "cat", "sat", "on", "mat", "dog", "log"]
    return [" ".join(draw.choices(words, k=draw.randint(1, 9))) for _ in range(NUM_TEXTS)]


def test_each_of_many_texts_is_what_it_is_alone_with_a_seed_of_its_own(
    writer: Writer, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[list[int]] = []
    begin = Writer.begin

    def seen(self: Writer, ids: list[list[int]], max_tokens: int) -> Begun:
        groups.append([len(one) for one in ids])
        return begin(self, ids, max_tokens)

    monkeypatch.setattr(Writer, "begin", seen)
    drawn = SamplingOptions(temperature=1.5, top_p=0.95, seed=40)
    found = list(write_texts(writer, texts, max_tokens=MAX_TOKENS, sampling=drawn))
    assert [len(group) for group in groups] == [32, 32, 6]
    assert max(groups[0]) <= min(groups[1])  # short beside short
    assert max(groups[1]) <= min(groups[2])
    for number, (text, one) in enumerate(zip(texts, found, strict=True)):
        alone = generate_text(writer, text, sampling=replace(drawn, seed=40 + number), max_tokens=MAX_TOKENS)
        assert one == alone
    assert [one.ended for one in found] == [len(one.ids) < MAX_TOKENS for one in found]
    same = list(write_texts(writer, [texts[0]] * 40, max_tokens=MAX_TOKENS, sampling=drawn))
    assert len({one.ids for one in same}) > 30  # one text, drawn with 40 seeds
    again = list(write_texts(writer, texts, max_tokens=MAX_TOKENS, sampling=drawn))
    assert again == found
    other = list(write_texts(writer, texts, max_tokens=MAX_TOKENS, sampling=replace(drawn, seed=200)))
    assert sum(a.ids != b.ids for a, b in zip(found, other, strict=True)) > 60


def test_greedy_texts_and_beams_of_many_are_those_of_each(writer: Writer, texts: list[str]) -> None:
    greedy = list(write_texts(writer, texts, max_tokens=MAX_TOKENS))
    assert greedy == [generate_text(writer, t, sampling=SamplingOptions(), max_tokens=MAX_TOKENS) for t in texts]
    options, stop = BeamOptions(3), writer.stop_rule(MAX_TOKENS)
    searched = list(write_texts(writer, texts, max_tokens=MAX_TOKENS, beams=options))
    for text, one in list(zip(texts, searched, strict=True))[::3]:
        ((best, *_),) = beam_search(writer.begin([writer.prompt(text).ids], MAX_TOKENS), options, stop)
        assert (one.ids, one.ended, one.score) == (best.ids, best.ended, pytest.approx(best.score, rel=1e-5))
        assert one.text == writer.tokenizer.decode(best.ids)


def test_nothing_is_said_alive_by_who_does_not_decode_and_each_token_is(writer: Writer, texts: list[str]) -> None:
    told: list[int] = []
    list(write_texts(writer, texts[:5], max_tokens=1, alive=lambda: told.append(1)))
    assert told == []  # one token comes from the prompt alone
    written = list(write_texts(writer, texts[:5], max_tokens=MAX_TOKENS, alive=lambda: told.append(1)))
    longest = max(len(one.ids) for one in written)
    assert longest - 1 <= len(told) <= longest
