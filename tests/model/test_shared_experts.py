"""Experts shared by ranks against a plain float64 loop on one process: token by token, without what has no targets."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pretrain.checkpoint import list_checkpoints, read_weights
from pretrain.config.schema import MoEConfig
from pretrain.model.experts import SparseMLP
from pretrain.sequence import SeqInfo
from pretrain.store import open_store
from tests.model.ranks_experts import CLIPPING, RATE, STEPS, batches_of, build, run_config, train_shared
from tests.ranks import RankResult, run_ranks

BOUND = 1e-5
EVEN: dict[str, Any] = {"lopsided": False}
LOPSIDED: dict[str, Any] = {"lopsided": True}


class TokenLoop(nn.Module):
    """The router and the experts as the papers define them, one token after the other."""

    def __init__(self, mlp: SparseMLP, config: MoEConfig) -> None:
        super().__init__()
        self.router, self.experts, self.config = mlp.router, mlp.experts, config

    def forward(self, x_TD: torch.Tensor, info: SeqInfo) -> tuple[torch.Tensor, torch.Tensor]:
        config, tokens = self.config, x_TD.shape[0] - (info.lengths[-1] if info.padding else 0)
        hidden, width, experts = config.feed_forward_width, config.width, config.num_experts
        gate_up, down = self.experts.gate_up.view(experts, 2, hidden, width), self.experts.down.view(experts, width, -1)
        outs, chosen, probabilities, z = [], [0] * experts, [], []
        for x in x_TD[:tokens]:
            logits = self.router.weight @ x
            probability = logits.exp() / logits.exp().sum()
            best = sorted(range(experts), key=lambda e: -float(probability.detach()[e]))[: config.experts_per_token]
            total = sum(probability[e] for e in best)
            out = sum(
                probability[e] / total * (down[e] @ (functional.silu(gate_up[e, 0] @ x) * (gate_up[e, 1] @ x)))
                for e in best
            )
            for e in best:
                chosen[e] += 1
            outs.append(out)
            probabilities.append(probability)
            z.append(logits.exp().sum().log() ** 2)
        mean = torch.stack(probabilities).mean(dim=0)
        balance = experts * sum(chosen[e] / tokens * mean[e] for e in range(experts))
        padding = x_TD.new_zeros(x_TD.shape[0] - tokens, width)
        return torch.cat([torch.stack(outs), padding]), torch.stack([balance, torch.stack(z).mean()])


@functools.cache
def plain(*, lopsided: bool) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Changes of the weights, mean objectives and gradient norms: torch's own SGD and clipping over the whole step."""
    config = run_config(1, lopsided=lopsided)
    loop = build(config, lopsided=lopsided).double()
    for layer in loop.layers:
        layer.mlp = TokenLoop(layer.mlp, config.model)
    before = {name: parameter.detach().clone() for name, parameter in loop.named_parameters()}
    optimizer = torch.optim.SGD(loop.parameters(), lr=RATE, momentum=0.9)
    objectives, norms = [], []
    for step in range(STEPS):
        batches = [batch for batch in batches_of(step) if batch.target_tokens]
        assert len(batches) == 5
        mean = sum(loop(batch).objective for batch in batches) / sum(batch.target_tokens for batch in batches)
        optimizer.zero_grad()
        mean.backward()
        norms.append(float(nn.utils.clip_grad_norm_(loop.parameters(), CLIPPING)))
        optimizer.step()
        objectives.append(mean.item())
    return {name: p.detach() - before[name] for name, p in loop.named_parameters()}, objectives, norms


CASES = {
    2: {"ZeRO-1": (1, EVEN), "ZeRO-2": (2, EVEN), "ZeRO-2, one expert": (2, LOPSIDED)},
    4: {"ZeRO-1": (1, EVEN), "ZeRO-2": (2, EVEN)},  # two ranks hold each expert
}


@pytest.mark.parametrize("ranks", CASES)
def test_experts_that_two_ranks_share_train_as_a_plain_loop_and_none_drops_a_token(ranks: int, tmp_path: Path) -> None:
    cases = {name: {"stage": stage, **kind} for name, (stage, kind) in CASES[ranks].items()}
    results = run_ranks(train_shared, ranks=ranks, arguments={"folder": str(tmp_path), "cases": cases}, timeout_s=200)
    for name, (_, kind) in CASES[ranks].items():
        config = run_config(1, **kind)
        changes, objectives, norms = plain(**kind)
        assert min(norms) > CLIPPING
        for result in results:
            assert result.value[name]["objectives"] == pytest.approx(objectives, rel=BOUND), name
            assert result.value[name]["norms"] == pytest.approx(norms, rel=BOUND), name
        _check_rows(results, name, kind)
        store, initial = open_store(str(tmp_path / name)), build(config, **kind).state_dict()
        weights = read_weights(store, list_checkpoints(store)[0].name)
        for parameter, change in changes.items():
            difference = weights[parameter].double() - initial[parameter].double() - change
            rounding = STEPS * 2**-24 * weights[parameter].norm()  # of weights that are kept in fp32
            assert difference.norm() < BOUND * change.norm() + rounding, (name, parameter)


def _check_rows(results: list[RankResult], name: str, kind: dict[str, Any]) -> None:
    """Every token that is no padding came to as many experts of every layer as it chose, in every step."""
    config = run_config(1, **kind).model
    for step in range(STEPS):
        infos = [batch.decoder_info for batch in batches_of(step)]
        tokens = sum(info.num_tokens - (info.lengths[-1] if info.padding else 0) for info in infos)
        rows = [result.value[name]["rows"][step] for result in results]
        assert sum(map(sum, rows)) == tokens * config.experts_per_token * config.num_layers
        if not kind["lopsided"]:
            assert min(map(min, rows)) > 0
        elif step == 0:
            assert rows == [[tokens * config.num_layers, 0], [0, 0]]
        else:  # the balance loss begins to spread them
            assert rows[0][0] > 0.9 * tokens * config.num_layers
