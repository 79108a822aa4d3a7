"""Dropout of attention weights: the formula counted by hand, the same in every backend that has it, replayed."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch

from pretrain.config.schema import LossConfig
from pretrain.errors import UserError
from pretrain.model.attention import Need, WeightDropout, attend, explain_attention, weight_dropout
from pretrain.model.attention.blocks import plan_blocks
from pretrain.model.attention.select import BACKENDS, refusal
from pretrain.model.dropout import mix
from pretrain.model.registry import build_model
from pretrain.sequence import SeqInfo
from tests.model.attention_cases import SCALE, Case, definition, inputs, relative_error, self_case
from tests.model.small import FAMILIES, batch_for, decoder_config

P = 0.3
DROPOUT = WeightDropout(P, 1234567)


def factors_by_hand(dropout: WeightDropout, heads: int, queries: range, keys: range) -> np.ndarray:
    """Element by element in whole numbers of Python."""

    def signed(x: int, bits: int) -> int:
        x &= 2**bits - 1
        return x - 2**bits if x >> (bits - 1) else x

    def code(place: int, seed: int) -> int:
        golden = signed(0x9E3779B97F4A7C15, 64)
        x = signed(signed(place + seed, 64) * golden, 64)
        x = signed((x ^ ((x % 2**64) >> 31)) * golden, 64)
        return signed(x >> 32, 32)

    def factor(head: int, query: int, key: int) -> float:
        x = code(head * 2**32 + query, mix(dropout.seed, 0)) ^ code(key, mix(dropout.seed, 1))
        x = signed((x ^ ((x % 2**32) >> 16)) * 0x7FEB352D, 32)
        x = signed((x ^ ((x % 2**32) >> 15)) * 0x846CA68B, 32)
        return 1 / (1 - dropout.p) if x >= round(dropout.p * 2**32) - 2**31 else 0.0

    return np.array([[[factor(h, q, k) for k in keys] for q in queries] for h in range(heads)])


def test_the_mask_is_the_formula_and_any_part_of_it_can_be_computed_alone() -> None:
    whole = DROPOUT.factors(3, range(40), range(25), torch.zeros(1, dtype=torch.float64))
    assert np.array_equal(whole.numpy(), factors_by_hand(DROPOUT, 3, range(40), range(25)))
    part = DROPOUT.factors(3, range(7, 19), range(11, 25), torch.zeros(1, dtype=torch.float64))
    assert torch.equal(part, whole[:, 7:19, 11:25])


def test_the_mask_drops_the_right_share_and_its_rows_columns_and_heads_are_unrelated() -> None:
    size = 512
    kept = DROPOUT.factors(4, range(size), range(size), torch.zeros(1, dtype=torch.float64)) > 0
    deviation = math.sqrt(P * (1 - P))
    assert abs(float(kept.double().mean()) - (1 - P)) < 4 * deviation / math.sqrt(kept.numel())
    noise = (kept.double() - (1 - P)) / deviation
    pairs = {
        "rows": (noise[:, 1:], noise[:, :-1]), "columns": (noise[:, :, 1:], noise[:, :, :-1]),
        "heads": (noise[1:], noise[:-1]), "transposed": (noise, noise.transpose(1, 2)),
    }  # fmt: skip
    for name, (a, b) in pairs.items():
        assert abs(float((a * b).mean())) < 5 / math.sqrt(a.numel()), name
    other = WeightDropout(P, 1234568).factors(4, range(size), range(size), torch.zeros(1, dtype=torch.float64)) > 0
    assert abs(float(((other.double() - (1 - P)) / deviation * noise).mean())) < 5 / math.sqrt(kept.numel())


CASES = [
    self_case(9, 1, 20, 13),
    self_case(9, 1, 20, window=4, softcap=5.0, biased=True, groups=4),
    Case((3, 5), (7, 2), causal=False, groups=1),
    Case((2, 1), (9, 4)),
]


@pytest.mark.parametrize("max_rows", [3, 512])
@pytest.mark.parametrize("backend", ["qblock", "reference", "auto"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradients_equal_the_definition_with_the_mask_by_hand(
    case: Case, backend: str, max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pretrain.model.attention.blocked.plan_blocks", partial(plan_blocks, max_rows=max_rows))
    q, k, v, slopes, grad = (x.requires_grad_() for x in inputs(case, torch.float64))
    rules = case.rules(slopes)
    infos = SeqInfo.from_lengths(case.q_lengths), SeqInfo.from_lengths(case.k_lengths)
    out = attend(
        q, k, v, q_info=infos[0], k_info=infos[1], causal=rules.causal, scale=SCALE, window=rules.window,
        softcap=rules.softcap, bias=rules.bias, dropout=DROPOUT, backend=backend,
    )  # fmt: skip
    watched = [q, k, v, *([slopes] if case.biased else [])]
    found = [out, *torch.autograd.grad(out, watched, grad)]
    # The definition without dropout gives the weights column by column: v = one-hot vectors.
    keys = sum(case.k_lengths)
    one_hot = torch.eye(keys, dtype=torch.float64)[:, None].expand(keys, case.groups, keys)
    weights, _ = definition(q, k, one_hot, slopes, case)
    mask = torch.from_numpy(factors_by_hand(DROPOUT, case.heads, range(len(q)), range(keys))).transpose(0, 1)
    right = torch.einsum("qhk,khc->qhc", weights * mask, v.repeat_interleave(case.heads // case.groups, dim=1))
    expected = [right, *torch.autograd.grad(right, watched, grad)]
    for mine, theirs in zip(found, expected, strict=True):
        assert relative_error(mine, theirs) < 1e-12


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in ("qblock", "reference")])
def test_backends_that_cannot_drop_exactly_refuse_by_name(backend: str) -> None:
    assert "from the device's generator" in (refusal(backend, Need("cpu", torch.float32, 8, dropout=True)) or "")
    config = decoder_config(attention=backend, attention_dropout=0.1)
    with pytest.raises(UserError, match=rf"model\.attention={backend} cannot run here: its kernels draw the dropout"):
        explain_attention(config, torch.device("cpu"), "fp32")


def test_nothing_is_dropped_outside_of_training_and_each_place_has_its_own_mask() -> None:
    assert weight_dropout(0.1, 5, 0, training=False) is None
    assert weight_dropout(0.0, 5, 0, training=True) is None
    seeds = {weight_dropout(0.1, key, site, training=True) for key in range(20) for site in range(20)}
    assert len(seeds) == 400


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_drops_weights_by_the_key_of_the_micro_batch_and_replays_them(family: str) -> None:
    config = FAMILIES[family](attention_dropout=0.4)
    batch = batch_for(config)

    def gradients(replayed: bool) -> list[torch.Tensor]:
        model = build_model(config, LossConfig(), seed=3, activation_checkpointing=replayed)
        model(batch).objective.backward()
        return [parameter.grad for parameter in model.parameters()]

    plain, replayed, without = gradients(False), gradients(True), build_model(config, LossConfig(), seed=3).eval()
    assert all(torch.equal(a, b) for a, b in zip(plain, replayed, strict=True))
    without(batch).objective.backward()
    assert not all(torch.allclose(a, b.grad) for a, b in zip(plain, without.parameters(), strict=True))
