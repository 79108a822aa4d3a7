"""Decoding with a cache equals full forward passes, token by token, in both families."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pretrain.config.schema import DecoderConfig, EncoderDecoderConfig, LossConfig
from pretrain.errors import UserError
from pretrain.generate.decode import StopRule, continue_ids, translate_ids
from pretrain.generate.sampling import SamplingOptions
from pretrain.model.registry import build_model
from pretrain.sequence import IGNORED_LABEL, Batch, SeqInfo

DECODER = DecoderConfig(
    vocabulary_size=50,
    width=32,
    num_heads=4,
    num_kv_heads=2,
    feed_forward_width=48,
    num_layers=2,
    qk_norm=True,
    dropout=0.3,
    init_std=0.3,
)
ENCODER_DECODER = EncoderDecoderConfig(
    vocabulary_size=50,
    width=32,
    num_heads=4,
    feed_forward_width=48,
    num_encoder_layers=2,
    num_decoder_layers=2,
    dropout=0.3,
)
GREEDY = SamplingOptions()
PROMPT = [7, 3, 44, 12, 9]


def _model(config: DecoderConfig | EncoderDecoderConfig) -> nn.Module:
    return build_model(config, LossConfig(), seed=11, activation_checkpointing=False).double()


def _full_logits(model: nn.Module, ids: list[int], source: list[int] | None = None) -> torch.Tensor:
    """Logits [T, V] of one forward pass over the whole text, without a cache and without dropout."""
    batch = Batch(
        index=0,
        decoder_ids=torch.tensor(ids),
        decoder_info=SeqInfo.from_lengths([len(ids)]),
        labels=torch.full((len(ids),), IGNORED_LABEL),
        encoder_ids=None if source is None else torch.tensor(source),
        encoder_info=None if source is None else SeqInfo.from_lengths([len(source)]),
        dropout_key=0,
        target_tokens=0,
        target_bytes=0,
        digest=0,
    )
    was_training = model.training
    with torch.no_grad():
        logits = model.eval().logits(batch)
    model.train(was_training)
    return logits


def test_cached_logits_of_a_decoder_equal_a_full_forward_at_every_token() -> None:
    model = _model(DECODER).eval()
    ids = [*PROMPT, 1, 30, 22, 8, 49, 0]
    full_TV = _full_logits(model, ids)
    with torch.no_grad():
        cache = model.new_cache(len(ids))
        torch.testing.assert_close(model.decode(torch.tensor(PROMPT), cache)[0], full_TV[len(PROMPT) - 1])
        for place in range(len(PROMPT), len(ids)):
            got_V = model.decode(torch.tensor([ids[place]]), cache)[0]
            torch.testing.assert_close(got_V, full_TV[place], rtol=1e-10, atol=1e-10)


def test_cached_logits_of_an_encoder_decoder_equal_a_full_forward_at_every_token() -> None:
    model = _model(ENCODER_DECODER).eval()
    source, ids = [5, 17, 33, 2], [2, 30, 22, 8, 49, 0]
    full_TV = _full_logits(model, ids, source)
    with torch.no_grad():
        cache = model.new_cache(len(ids), model.encode(torch.tensor(source)))
        for place, token in enumerate(ids):
            got_V = model.decode(torch.tensor([token]), cache)[0]
            torch.testing.assert_close(got_V, full_TV[place], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("training", [False, True])
def test_greedy_text_is_that_of_full_forward_passes_and_dropout_is_off(training: bool) -> None:
    model = _model(DECODER).train(training)
    ids = list(PROMPT)
    for _ in range(12):
        ids.append(int(_full_logits(model, ids)[-1].argmax()))
    assert list(continue_ids(model, PROMPT, GREEDY, StopRule(12))) == ids[len(PROMPT) :]
    assert model.training == training  # sampling in the middle of training leaves no trace
    assert all(module.training == training for module in model.modules())


def test_greedy_target_is_that_of_full_forward_passes() -> None:
    model, source, ids = _model(ENCODER_DECODER), [5, 17, 33, 2, 0], [2]
    for _ in range(10):
        ids.append(int(_full_logits(model, ids, source)[-1].argmax()))
    assert list(translate_ids(model, source, 2, GREEDY, StopRule(10))) == ids[1:]


def test_the_end_id_ends_the_text_and_banned_or_unknown_ids_never_come_out() -> None:
    model = _model(DECODER)
    hot = SamplingOptions(temperature=50.0, seed=4)  # nearly uniform
    free = list(continue_ids(model, PROMPT, hot, StopRule(200)))
    assert len(free) == 200
    assert {0, 1} <= set(free)
    assert max(free) > 30
    stopped = list(continue_ids(model, PROMPT, hot, StopRule(200, end_id=0)))
    assert stopped == free[: free.index(0)]
    bounded = list(continue_ids(model, PROMPT, hot, StopRule(200, banned_ids=(1, 5), vocabulary_size=30)))
    assert len(bounded) == 200
    assert not {1, 5} & set(bounded)
    assert max(bounded) < 30


def test_sampling_draws_nothing_from_the_global_random_state() -> None:
    model = _model(DECODER)
    before = torch.random.get_rng_state()
    list(continue_ids(model, PROMPT, SamplingOptions(temperature=1.0), StopRule(3)))
    assert torch.equal(before, torch.random.get_rng_state())


def test_empty_input_is_refused_before_anything_is_computed() -> None:
    with pytest.raises(UserError, match="prompt has no token"):
        continue_ids(_model(DECODER), [], GREEDY, StopRule(3))
    with pytest.raises(UserError, match="source has no token"):
        translate_ids(_model(ENCODER_DECODER), [], 2, GREEDY, StopRule(3))
    with pytest.raises(UserError, match="max_tokens=0"):
        StopRule(0)


def test_a_text_that_ends_early_costs_only_the_memory_that_it_uses() -> None:
    model = _model(DECODER)
    stop = StopRule(max_tokens=10**15)
    first = list(zip(range(200), continue_ids(model, PROMPT, GREEDY, stop), strict=False))
    exact = list(continue_ids(model, PROMPT, GREEDY, StopRule(max_tokens=200)))
    assert [token for _, token in first] == exact  # grown past its first size more than once
