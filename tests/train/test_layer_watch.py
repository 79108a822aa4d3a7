"""Norms by layer against one process in float64, at every ZeRO stage; heads that collapse are warned of."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pretrain.log import Log
from pretrain.metrics.definitions import unknown_fields
from pretrain.model.attention.observe import attention_maps, head_facts
from pretrain.model.registry import build_model
from pretrain.optim.groups import parameter_groups
from pretrain.train.build import Training
from tests.engine.small import MICRO_BATCHES, micro_batch, run_config
from tests.ranks import run_ranks
from tests.train import rank_layers


def _reference() -> tuple[dict[str, dict[str, float]], list[Any]]:
    """Two steps of a plain loop in float64: norms of the second, and the facts of its attention."""
    config = run_config(0, dropout=0.2)
    model = build_model(config.model, config.loss, seed=config.seed).double()
    groups = parameter_groups(model, config.optimizer.weight_decay)
    for group in groups:
        group.pop("name")
    chosen: Any = config.optimizer
    optimizer = torch.optim.AdamW(groups, lr=rank_layers.RATE, betas=(chosen.beta1, chosen.beta2), eps=chosen.eps)
    layers = [f"layers.{place}" for place in range(config.model.num_layers)]
    squares, counts, facts = dict.fromkeys(layers, 0.0), dict.fromkeys(layers, 0), []
    for step in (0, 1):
        batches = [micro_batch(step, j) for j in range(MICRO_BATCHES)]
        optimizer.zero_grad()
        if step:
            model.train()
            maps = attention_maps(
                model, batches[0], document=max(range(2), key=batches[0].decoder_info.lengths.__getitem__)
            )
            facts = [fact for found in maps for fact in head_facts(found)]
        for batch in batches:
            kept: list[torch.Tensor] = []
            handles = [
                model.get_submodule(name).register_forward_hook(lambda layer, inputs, out, to=kept: to.append(out))
                for name in layers
            ]
            (model(batch).objective / sum(b.target_tokens for b in batches)).backward()
            for handle in handles:
                handle.remove()
            for name, out in zip(layers, kept, strict=True):
                squares[name] += step * float(out.detach().pow(2).sum())
                counts[name] += step * out.numel()
        torch.nn.utils.clip_grad_norm_(model.parameters(), chosen.gradient_clipping)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step()
    table: dict[str, dict[str, float]] = {}
    for name, after in model.named_parameters():
        layer = next((layer for layer in layers if name.startswith(layer + ".")), name.split(".")[0])
        row = table.setdefault(layer, {"parameter_norm": 0.0, "update_norm": 0.0})
        row["parameter_norm"] += float(after.detach().pow(2).sum())
        row["update_norm"] += float((after.detach() - before[name]).pow(2).sum())
    table = {layer: {key: math.sqrt(value) for key, value in row.items()} for layer, row in table.items()}
    for name in layers:
        table[name]["activation_rms"] = math.sqrt(squares[name] / counts[name])
    return table, facts


def test_norms_and_attention_equal_one_process_in_float64_at_every_stage() -> None:
    expected, facts = _reference()
    results = run_ranks(rank_layers.watched_steps, ranks=2, timeout_s=120)
    flat = results[0].value.pop("flat")["warnings"]
    for place, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
        assert any(word.startswith(f"decoder.{place} head {head} is near uniform") for word in flat), flat
    for case, tables in results[0].value.items():
        assert unknown_fields({"step": 2, **tables}) == []
        assert tables["layers"].keys() == expected.keys()
        for layer, row in expected.items():
            assert tables["layers"][layer] == pytest.approx(row, rel=2e-5), (case, layer)
        assert results[1].value[case]["layers"] == tables["layers"]
        assert "attention" not in results[1].value[case]  # one rank looks
        assert tables["attention"].keys() == {"decoder.0", "decoder.1"}  # once each, also if it is computed again
        for place in range(2):
            mine = [fact for fact in facts if fact.layer == f"decoder.{place}"]
            row = tables["attention"][f"decoder.{place}"]
            assert row["entropy"] == pytest.approx(sum(f.entropy for f in mine) / len(mine), rel=1e-4)
            assert row["largest_score"] == pytest.approx(max(f.largest_score for f in mine), rel=1e-4)
            assert row["lowest_entropy_fraction"] == pytest.approx(min(f.entropy_fraction for f in mine), rel=1e-4)


def test_a_head_is_warned_of_once_and_many_heads_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    training: Any = SimpleNamespace(warned=set(), place=SimpleNamespace(log=Log(0)))
    words = [f"decoder.0 head {head} is near uniform: its entropy is 99.{head} %" for head in range(12)]
    Training.warn(training, 100, words)
    Training.warn(training, 200, [word.replace("99.", "98.") for word in words])
    Training.warn(training, 300, ["decoder.1 head 0 gives 97.0% of its weight to position 0"])
    warnings = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert len(warnings) == 2
    assert "step=100" in warnings[0]
    assert "more=4" in warnings[0]
    assert "decoder.1 head 0 gives 97.0%" in warnings[1]
