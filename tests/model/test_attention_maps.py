"""Maps, entropies and warnings against transformers' own attention weights and planted faults."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pretrain.config.schema import AnyModelConfig, LossConfig
from pretrain.model.attention import attend
from pretrain.model.attention.observe import (
    AttentionCall,
    AttentionMap,
    attention_maps,
    head_facts,
    observed,
    warnings_of,
)
from pretrain.model.hf.directory import export_model
from pretrain.model.hf.family import ExportOptions
from pretrain.model.registry import build_model
from pretrain.sequence import Batch, SeqInfo
from tests.model.small import decoder_config, encoder_config, gpt2_config, lm_batch, pair_batch, t5_config

FAMILIES: dict[str, tuple[AnyModelConfig, str]] = {
    "llama": (decoder_config(init_std=0.5), "LlamaForCausalLM"),
    "gpt2": (gpt2_config(init_std=0.5), "GPT2LMHeadModel"),
    "bert": (encoder_config(init_std=0.5), "BertForMaskedLM"),
    "t5": (t5_config(tied_embeddings=False), "T5ForConditionalGeneration"),
}


def _theirs(output: Any) -> dict[str, torch.Tensor]:
    """transformers' attention weights by our names."""
    named = {
        "decoder": output.get("decoder_attentions") or output.get("attentions"),
        "encoder": output.get("encoder_attentions"),
        "cross": output.get("cross_attentions"),
    }
    return {f"{kind}.{i}": layer[0] for kind, layers in named.items() if layers for i, layer in enumerate(layers)}


@pytest.mark.parametrize("case", FAMILIES)
def test_the_maps_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    config, class_name = FAMILIES[case]
    model = build_model(config, LossConfig(), seed=3).eval()
    batch = pair_batch([13], [17]) if config.layout == "encoder_decoder" else lm_batch([21])
    export_model(dict(model.named_parameters()), config, tmp_path / "hf", ExportOptions(32, pad_id=1, eos_id=0))
    theirs = getattr(transformers, class_name).from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    ids: dict[str, Any] = {"input_ids": batch.decoder_ids[None]}
    if batch.encoder_ids is not None:
        ids = {"input_ids": batch.encoder_ids[None], "decoder_input_ids": batch.decoder_ids[None]}
    with torch.no_grad():
        expected = _theirs(theirs(**ids, output_attentions=True))
    if case == "bert":  # its only stack sees both sides
        expected = {name.replace("decoder", "encoder"): weights for name, weights in expected.items()}

    maps = attention_maps(model, batch)

    assert sorted(found.name for found in maps) == sorted(expected)
    for found in maps:
        torch.testing.assert_close(found.weights, expected[found.name], rtol=1e-4, atol=1e-6)


def test_a_document_of_a_packed_batch_has_the_map_it_has_alone() -> None:
    model = build_model(decoder_config(init_std=0.5), LossConfig(), seed=3).eval()
    packed = lm_batch([9, 14])
    second = Batch(
        0, packed.decoder_ids[9:], SeqInfo.from_lengths([14]), packed.labels[9:], None, None, 0, 14, 14, 0
    )  # fmt: skip
    for ours, alone in zip(attention_maps(model, packed, document=1), attention_maps(model, second), strict=True):
        torch.testing.assert_close(ours.weights, alone.weights, rtol=1e-5, atol=1e-6)


def test_facts_of_a_head_equal_a_plain_loop() -> None:
    model = build_model(gpt2_config(init_std=0.5), LossConfig(), seed=8).eval()
    found = attention_maps(model, lm_batch([24]))[1]
    for fact in head_facts(found):
        entropies, fractions, deviations = [], [], []
        for query in range(7, 24):
            row = [float(found.weights[fact.head, query, key]) for key in range(query + 1)]
            seen = [float(found.scores[fact.head, query, key]) for key in range(query + 1)]
            entropies.append(-sum(w * math.log(w) for w in row if w > 0))
            fractions.append(entropies[-1] / math.log(query + 1))
            mean = sum(seen) / len(seen)
            deviations.append(math.sqrt(sum((s - mean) ** 2 for s in seen) / len(seen)))
        assert fact.entropy == pytest.approx(sum(entropies) / 17, rel=1e-4)
        assert fact.entropy_fraction == pytest.approx(sum(fractions) / 17, rel=1e-4)
        assert fact.score_deviation == pytest.approx(sum(deviations) / 17, rel=1e-4)
        largest = max(abs(float(found.scores[fact.head, q, k])) for q in range(7, 24) for k in range(q + 1))
        assert fact.largest_score == pytest.approx(largest, rel=1e-5)


def _map(queries: torch.Tensor, keys: torch.Tensor, scale: float) -> AttentionMap:
    """The map of one causal call with these queries and keys [T, H, K]."""
    calls: list[AttentionCall] = []
    info = SeqInfo.from_lengths([queries.shape[0]])
    with observed(calls.append):
        attend(queries, keys, keys, q_info=info, causal=True, scale=scale)
    assert len(calls) == 1

    class OneCall(torch.nn.Module):
        def hidden(self, batch: Batch) -> torch.Tensor:
            return attend(queries, keys, keys, q_info=info, causal=True, scale=scale)

    return attention_maps(OneCall(), lm_batch([queries.shape[0]]))[0]


def test_planted_faults_are_warned_of_and_a_healthy_head_is_not() -> None:
    generator = torch.Generator().manual_seed(1)
    queries, keys = (torch.randn(40, 1, 16, generator=generator) for _ in range(2))
    sink = keys.clone()
    sink[3] = 50.0
    cases = {
        "healthy": (queries, keys, 0.25, []),
        "uniform": (queries * 1e-4, keys, 0.25, ["near uniform", "flat scores"]),
        "one position": (queries.abs(), sink, 0.25, ["of its weight to position 3", "saturated"]),
        "no scale": (queries * 6, keys, 1.0, ["saturated", "an unusual scale: the scale is 1, 1/sqrt(head width 16)"]),
    }
    for queries_of, keys_of, scale, expected in cases.values():
        found = _map(queries_of, keys_of, scale)
        words = warnings_of(found, head_facts(found))
        assert len(words) == len(expected), words
        for word, part in zip(words, expected, strict=True):
            assert part in word


def test_nobody_is_told_when_the_block_has_ended() -> None:
    calls: list[AttentionCall] = []
    x, info = torch.zeros(4, 1, 8), SeqInfo.from_lengths([4])
    with observed(calls.append):
        attend(x, x, x, q_info=info, causal=True, scale=1.0)
    attend(x, x, x, q_info=info, causal=True, scale=1.0)
    assert len(calls) == 1
