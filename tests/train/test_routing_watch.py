"""What a record says of the routers, against choices counted by hand from the routers' logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pretrain.config.schema import LossConfig
from pretrain.model.registry import build_model
from pretrain.model.routing import routing_told, tell_routing
from pretrain.sequence import SeqInfo
from pretrain.train.routing_watch import RoutingWatch
from tests.model.small import empty_batch_for, lm_batch, moe_config


@pytest.mark.parametrize("checkpointing", [False, True])
def test_losses_shares_and_idle_experts_are_those_of_a_count_by_hand(checkpointing: bool) -> None:
    config = moe_config(num_experts=6, experts_per_token=2, init_std=0.3)
    model = build_model(config, LossConfig(), seed=3, activation_checkpointing=checkpointing)
    router = model.layers[0].mlp.router
    with torch.no_grad():  # against each other: of experts 0 and 1 at most one is chosen, of 2 and 3 likewise
        router.weight[1], router.weight[3] = -router.weight[0], -router.weight[2]
        router.weight[4:] = 0
    heard: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    hooks = [
        layer.mlp.router.register_forward_hook(lambda _, given, out, place=place: heard[place].append(out.detach()))
        for place, layer in enumerate(model.layers)
    ]
    batches = [lm_batch((9, 4), seed=1), lm_batch((3, 5), seed=2), replace(empty_batch_for(config),
               decoder_info=SeqInfo.from_lengths([40], padding=True))]  # fmt: skip
    watch, balances, zs = RoutingWatch(config), [], []
    counts = [[0] * 6 for _ in model.layers]
    for batch in batches:
        with watch.forward(batch):
            sums = model(batch)
        logits = [heard[place].pop() for place in heard]
        if checkpointing:
            sums.objective.backward()  # computes the layers again, which is not the step's routing
            for rows in heard.values():
                rows.clear()
        for place, rows in enumerate(logits):
            chosen, probability = [0] * 6, torch.zeros(6, dtype=torch.float64)
            for row in rows.double():
                weights = row.exp() / row.exp().sum()
                for expert in sorted(range(6), key=lambda e: -float(weights[e]))[:2]:
                    chosen[expert] += 1
                    counts[place][expert] += 1
                probability += weights
            if batch.target_tokens:
                tokens = len(rows)
                balance = 6 * sum(chosen[e] / tokens * float(probability[e]) / tokens for e in range(6))
                balances.append((batch.target_tokens, balance))
                zs.append(
                    (batch.target_tokens, sum(float(row.exp().sum().log()) ** 2 for row in rows.double()) / tokens)
                )
    for hook in hooks:
        hook.remove()
    model(batches[0])  # nobody listens
    fields = watch.fields(watch.values())
    targets = sum(batch.target_tokens for batch in batches)
    assert targets == 17
    assert fields["balance_loss"] == pytest.approx(sum(n * value for n, value in balances) / 2 / targets, rel=1e-6)
    assert fields["router_z_loss"] == pytest.approx(sum(n * value for n, value in zs) / 2 / targets, rel=1e-6)
    assert fields["largest_expert_share"] == max(max(layer) / sum(layer) for layer in counts) > 1 / 6
    assert fields["idle_experts"] == sum(layer.count(0) for layer in counts)


def test_of_a_step_without_tokens_nothing_is_told_and_all_ranks_tell_as_many_numbers() -> None:
    config = moe_config(num_experts=3, num_layers=2)
    silent = RoutingWatch(config)
    assert silent.values() == [0, 0.0, 0.0, *[0] * 6]
    assert silent.fields(silent.values()) == {
        "balance_loss": None, "router_z_loss": None, "largest_expert_share": None, "idle_experts": 6
    }  # fmt: skip
    one, two = RoutingWatch(config), RoutingWatch(config)
    for watch, batch, counts in ((one, lm_batch((3,)), [4, 0, 2]), (two, lm_batch((7,)), [6, 0, 0])):
        with watch.forward(batch):
            for place in range(2):
                tell_routing(torch.tensor(counts).roll(place), torch.tensor([1.0 + batch.target_tokens, 0.5]))
    sums = [a + b for a, b in zip(one.values(), two.values(), strict=True)]
    assert one.fields(sums) == {
        "balance_loss": (2 * 3.0 + 6 * 7.0) / 8, "router_z_loss": 0.5, "largest_expert_share": 10 / 12,
        "idle_experts": 2,
    }  # fmt: skip


def test_the_listener_is_gone_behind_the_block() -> None:
    heard: list[torch.Tensor] = []
    with routing_told(lambda counts, losses: heard.append(counts)):
        tell_routing(torch.ones(2), torch.zeros(2))
    tell_routing(torch.ones(2), torch.zeros(2))
    assert len(heard) == 1
