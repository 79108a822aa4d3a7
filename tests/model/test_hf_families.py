"""GPT-2, T5, Gemma, mixtures of experts and the 2017 Transformer against those of transformers, both ways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from pretrain.config.schema import AnyModelConfig, EncoderDecoderConfig, GPT2Config, LossConfig, T5Config
from pretrain.errors import UserError
from pretrain.model.flops import parameter_counts
from pretrain.model.hf.directory import export_model, import_model
from pretrain.model.hf.family import ExportOptions
from pretrain.model.registry import build_model
from pretrain.sequence import Batch
from tests.model.small import (
    encoder_decoder_config,
    gemma_3_config,
    gemma_config,
    gpt2_config,
    lm_batch,
    moe_config,
    pair_batch,
    t5_config,
    t5_v1_0_config,
)
from tests.model.their_gradients import assert_gradients_equal

CASES: dict[str, tuple[AnyModelConfig, str]] = {
    "gpt2": (gpt2_config(dropout=0.1, attention_dropout=0.2, init_std=0.2), "GPT2LMHeadModel"),
    "gpt2-untied": (gpt2_config(tied_embeddings=False, init_std=0.2), "GPT2LMHeadModel"),
    "t5-v1.0": (t5_v1_0_config(dropout=0.1, attention_dropout=0.1), "T5ForConditionalGeneration"),
    "t5-v1.1": (t5_config(tied_embeddings=False), "T5ForConditionalGeneration"),
    "marian": (encoder_decoder_config(norm_eps=1e-5, dropout=0.1, attention_dropout=0.2), "MarianMTModel"),
    "gemma-2": (gemma_config(init_std=0.2, query_scale=7.0, attention_dropout=0.2), "Gemma2ForCausalLM"),
    "gemma-3": (gemma_3_config(init_std=0.2), "Gemma3ForCausalLM"),
    "mixtral": (moe_config(init_std=0.2, head_width=10), "MixtralForCausalLM"),
    "qwen3-moe": (
        moe_config(init_std=0.2, qk_norm=True, head_width=8, experts_per_token=3, tied_embeddings=False),
        "Qwen3MoeForCausalLM",
    ),
    "qwen3-moe-plain-weights": (
        moe_config(init_std=0.2, qk_norm=True, head_width=8, normalised_experts=False),
        "Qwen3MoeForCausalLM",
    ),
}
THEIRS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=101, n_positions=32, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2)
    ),
    "t5-v1.0": lambda: transformers.T5ForConditionalGeneration(_t5_config(feed_forward_proj="relu")),
    "t5-v1.1": lambda: transformers.T5ForConditionalGeneration(
        _t5_config(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    ),
    "marian": lambda: transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=101, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48, decoder_ffn_dim=48,
            encoder_attention_heads=4, decoder_attention_heads=4, activation_function="relu", scale_embedding=True,
            init_std=0.2, pad_token_id=1, eos_token_id=0, decoder_start_token_id=2, forced_eos_token_id=0,
        )
    ),
    "gemma-2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            sliding_window=5, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, **_GEMMA, num_hidden_layers=4
        )
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=101, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=5, initializer_range=0.2, tie_word_embeddings=True,
        )
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=101, hidden_size=32, moe_intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=10, num_experts=6, num_experts_per_tok=3, initializer_range=0.2,
            tie_word_embeddings=True,
        )
    ),
    "gemma-3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(sliding_window=5, sliding_window_pattern=3, **_GEMMA, num_hidden_layers=7)
    ),
}  # fmt: skip
_GEMMA = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 10, "query_pre_attn_scalar": 16, "initializer_range": 0.2, "attn_implementation": "eager",
}  # fmt: skip


def _t5_config(**changes: Any) -> transformers.T5Config:
    return transformers.T5Config(
        vocab_size=101, d_model=32, d_kv=6, d_ff=48, num_layers=2, num_decoder_layers=3, num_heads=4,
        relative_attention_num_buckets=8, relative_attention_max_distance=12, **changes,
    )  # fmt: skip


def build(config: AnyModelConfig) -> torch.nn.Module:
    model = build_model(config, LossConfig(), seed=5).eval()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases and norms away from 0 and 1, so that a swap would show
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def batch_of(config: AnyModelConfig) -> Batch:
    return pair_batch([19], [23]) if config.layout == "encoder_decoder" else lm_batch([24])


def their_output(model: Any, batch: Batch) -> Any:
    labels = batch.labels[None]
    if batch.encoder_ids is None:
        return model(batch.decoder_ids[None])
    return model(batch.encoder_ids[None], decoder_input_ids=batch.decoder_ids[None], labels=labels)


@pytest.mark.parametrize("case", CASES)
def test_an_exported_model_gives_the_same_logits_and_gradients_in_transformers(tmp_path: Path, case: str) -> None:
    config, class_name = CASES[case]
    model, batch = build(config), batch_of(config)
    export_model(dict(model.named_parameters()), config, tmp_path / "hf", ExportOptions(32, pad_id=1, eos_id=0))
    auto = transformers.AutoModelForCausalLM if batch.encoder_ids is None else transformers.AutoModelForSeq2SeqLM
    theirs = auto.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager" if "gemma" in case else None
    ).eval()
    assert type(theirs).__name__ == class_name
    logits = their_output(theirs, batch).logits[0]
    ours = model.logits(batch)
    largest = logits.abs().max().item()
    assert largest > 0.5  # else agreement would mean nothing
    torch.testing.assert_close(ours, logits, atol=1e-5 * largest, rtol=0)
    torch.nn.functional.cross_entropy(logits, batch.labels, reduction="sum").backward()
    model(batch).objective.backward()
    unread = 1 if case in ("marian", "gemma-2", "gemma-3") else None  # the padding id
    assert_gradients_equal(model, theirs, tmp_path / "gradients", unread_id=unread)


@pytest.mark.parametrize("case", THEIRS)
def test_a_model_saved_by_transformers_gives_the_same_logits_here(tmp_path: Path, case: str) -> None:
    torch.manual_seed(3)
    theirs = THEIRS[case]().eval()
    theirs.save_pretrained(tmp_path / "theirs")
    config, state = import_model(tmp_path / "theirs")
    assert config.tied_embeddings == (case != "t5-v1.1")
    model, batch = build_model(config, LossConfig(), seed=0).eval(), batch_of(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["head.weight"] if config.tied_embeddings else [], [])
    with torch.no_grad():
        expected = their_output(theirs, batch).logits[0]
        torch.testing.assert_close(model.logits(batch), expected, atol=1e-5 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_export_then_import_gives_equal_weights_and_config(tmp_path: Path, case: str) -> None:
    config, _ = CASES[case]
    state = {name: tensor.detach() for name, tensor in build(config).named_parameters()}
    export_model(state, config, tmp_path / "hf", ExportOptions(32))
    back_config, back = import_model(tmp_path / "hf")
    # What their config cannot say: how the weights once began.
    assert back_config == config
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    stored = load_file(tmp_path / "hf/model.safetensors")
    assert ("lm_head.weight" in stored) == (not config.tied_embeddings)


def test_gpt2_small_has_the_published_parameters() -> None:
    config = GPT2Config(
        vocabulary_size=50257, width=768, num_heads=12, feed_forward_width=3072, num_layers=12, max_length=1024
    )
    assert parameter_counts(config).total == 124_439_808


@pytest.mark.parametrize(
    ("size", "numbers", "published"),
    [
        ("t5-small", {"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8}, 60_506_624),
        ("t5-11b", {"d_model": 1024, "d_ff": 65536, "num_layers": 24, "num_heads": 128, "d_kv": 128}, None),
    ],
)
def test_a_published_t5_has_as_many_parameters_here(size: str, numbers: dict[str, int], published: int | None) -> None:
    with torch.device("meta"):
        theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(**numbers))
    config = T5Config(
        vocabulary_size=32128, width=numbers["d_model"], num_heads=numbers["num_heads"],
        head_width=numbers.get("d_kv", 64), feed_forward_width=numbers["d_ff"], feed_forward="relu",
        num_encoder_layers=numbers["num_layers"], num_decoder_layers=numbers["num_layers"],
    )  # fmt: skip
    counted = parameter_counts(config).total
    assert counted == sum(parameter.numel() for parameter in theirs.parameters())
    assert published in (None, counted), size


@pytest.mark.parametrize(
    ("size", "width", "hidden", "heads", "count", "paper"),
    [("base", 512, 2048, 8, 63_082_496, 65e6), ("big", 1024, 4096, 16, 214_245_376, 213e6)],
)
def test_the_transformer_of_2017_has_its_parameters(
    size: str, width: int, hidden: int, heads: int, count: int, paper: float
) -> None:
    """Counted with every bias, on the paper's vocabulary of 37,000; the paper prints 65 M and 213 M."""
    config = EncoderDecoderConfig(
        vocabulary_size=37000, width=width, num_heads=heads, feed_forward_width=hidden, num_encoder_layers=6,
        num_decoder_layers=6,
    )  # fmt: skip
    attention, norm = 4 * (width * width + width), 2 * width
    mlp = width * hidden + hidden + hidden * width + width
    by_hand = 37000 * width + 6 * (attention + mlp + 2 * norm) + 6 * (2 * attention + mlp + 3 * norm)
    assert parameter_counts(config).total == by_hand == count, size
    assert count == pytest.approx(paper, rel=0.035)


def test_marian_is_refused_where_it_computes_something_else(tmp_path: Path) -> None:
    config = encoder_decoder_config(norm_eps=1e-6)
    with pytest.raises(UserError, match=r"model\.norm_eps=1e-06 cannot be exported\..*1e-05"):
        export_model(dict(build(config).named_parameters()), config, tmp_path / "hf", ExportOptions(32))
    theirs = THEIRS["marian"]()
    theirs.final_logits_bias[0, 3] = 1.0
    theirs.save_pretrained(tmp_path / "theirs")
    with pytest.raises(UserError, match="final_logits_bias is not zero"):
        import_model(tmp_path / "theirs")
