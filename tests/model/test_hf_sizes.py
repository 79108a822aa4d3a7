"""Published models in full size, on meta tensors: every name and shape is that of transformers, none is left over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from pretrain.config.schema import AnyModelConfig, LossConfig
from pretrain.model.hf.directory import exchange_of, import_config, plan_export
from pretrain.model.hf.family import ExportOptions
from pretrain.model.registry import build_model

_LLAMA_3 = {"vocab_size": 128256, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
_T5 = {"d_model": 1024, "d_kv": 128, "num_heads": 128, "num_layers": 24, "vocab_size": 32128}

# config.json of the published models as far as it decides shapes; parameters as their authors state them (or count).
MODELS: dict[str, tuple[str, dict[str, Any], float]] = {
    "Llama 3 8B": (
        "LlamaForCausalLM",
        {**_LLAMA_3, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8}, 8.03e9,
    ),
    "Llama 3 70B": (
        "LlamaForCausalLM",
        {**_LLAMA_3, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
         "num_attention_heads": 64, "num_key_value_heads": 8}, 70.55e9,
    ),
    "Qwen3 8B": (
        "Qwen3ForCausalLM",
        {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
         "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6,
         "rms_norm_eps": 1e-6, "tie_word_embeddings": False}, 8.19e9,
    ),
    "GPT-2 XL": ("GPT2LMHeadModel", {"n_embd": 1600, "n_layer": 48, "n_head": 25}, 1.558e9),
    "T5 11B v1.0": ("T5ForConditionalGeneration", {**_T5, "d_ff": 65536, "feed_forward_proj": "relu"}, 11.31e9),
    "T5 v1.1 XXL": (
        "T5ForConditionalGeneration",
        {**_T5, "d_model": 4096, "d_kv": 64, "num_heads": 64, "d_ff": 10240, "feed_forward_proj": "gated-gelu",
         "tie_word_embeddings": False}, 11.14e9,
    ),
    "Gemma 2 9B": (
        "Gemma2ForCausalLM",
        {"vocab_size": 256000, "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256}, 9.24e9,
    ),
    "BERT large": (
        "BertForMaskedLM",
        {"vocab_size": 30522, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
         "intermediate_size": 4096}, 335.2e6,
    ),
    "Marian base": (
        "MarianMTModel",
        {"vocab_size": 37000, "decoder_vocab_size": 37000, "d_model": 512, "encoder_layers": 6, "decoder_layers": 6,
         "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "encoder_attention_heads": 8, "decoder_attention_heads": 8,
         "activation_function": "relu", "scale_embedding": True, "pad_token_id": 36999}, 63.08e6,
    ),
}  # fmt: skip


def theirs_on_meta(kind: str, values: dict[str, Any]) -> torch.nn.Module:
    values = {name: value for name, value in values.items() if name != "rope_theta"} | (
        {"rope_parameters": {"rope_type": "default", "rope_theta": values["rope_theta"]}}
        if "rope_theta" in values
        else {}
    )
    cls = getattr(transformers, kind)
    with torch.device("meta"):
        return cls(cls.config_class(**values))


def ours_on_meta(config: AnyModelConfig) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = build_model(config, LossConfig(), seed=0, initial=False)
    return dict(model.named_parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_has_the_same_names_and_shapes_both_ways(name: str) -> None:
    kind, values, count = MODELS[name]
    model = theirs_on_meta(kind, values)
    body = model.config.to_dict()
    if "tie_word_embeddings" in values:  # T5's own config says True for v1.1 as well
        body["tie_word_embeddings"] = values["tie_word_embeddings"]
    config = import_config(body)
    ours = ours_on_meta(config)
    assert sum(parameter.numel() for parameter in ours.values()) == pytest.approx(count, rel=2e-3)

    # What they save: a tied name once, and not what they say is never saved.
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tied = set(model.all_tied_weights_keys)
    theirs = {
        key: tuple(tensor.shape) for key, tensor in model.state_dict().items() if key not in tied and key not in ignored
    }
    shapes = {key: tuple(tensor.shape) for key, tensor in ours.items()}
    _, entries = plan_export(ours, shapes, config, ExportOptions(512))
    written = {entry.name: entry.shape for entry in entries}
    # Their tied copies may be written; whatever else is written must be theirs, and all of theirs must be written.
    assert {key: shape for key, shape in written.items() if key not in tied} == theirs

    read = exchange_of(body).weights(config)
    assert {weight.ours: weight.shape for weight in read} == shapes
