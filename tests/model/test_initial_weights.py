"""Initial weights against those of transformers: each matrix with the published spread of its family."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers

from pretrain.config.schema import LossConfig
from pretrain.model.hf.directory import import_model
from pretrain.model.registry import build_model

_T5 = {"vocab_size": 500, "d_model": 64, "d_kv": 24, "d_ff": 160, "num_layers": 2, "num_heads": 8}
_BLOCKS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 160}
THEIRS = {
    "t5-v1.0": transformers.T5Config(feed_forward_proj="relu", **_T5),
    "t5-v1.1": transformers.T5Config(feed_forward_proj="gated-gelu", tie_word_embeddings=False, **_T5),
    "gpt2": transformers.GPT2Config(vocab_size=500, n_positions=64, n_embd=64, n_layer=8, n_head=4),
    "bert": transformers.BertConfig(vocab_size=500, **_BLOCKS),
    "llama": transformers.LlamaConfig(vocab_size=500, num_key_value_heads=2, **_BLOCKS),
}


@pytest.mark.parametrize("case", THEIRS)
def test_every_matrix_starts_with_the_spread_that_its_authors_gave_it(case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    auto = {"t5": transformers.AutoModelForSeq2SeqLM, "be": transformers.AutoModelForMaskedLM}
    model = auto.get(case[:2], transformers.AutoModelForCausalLM).from_config(THEIRS[case])
    if case == "bert":
        torch.nn.init.zeros_(model.bert.embeddings.token_type_embeddings.weight)  # an import adds it to the positions
    model.save_pretrained(tmp_path / "theirs")
    config, theirs = import_model(tmp_path / "theirs")
    if case == "llama":
        config = config.model_copy(update={"depth_scaling": "none"})  # theirs does not know the depth
    ours = dict(build_model(config, LossConfig(), seed=1).named_parameters())
    if case == "t5-v1.1":
        # They draw the untied output from N(0, 1); the authors' code gives it, as any projection, D^-0.5.
        theirs["head.weight"] *= config.width**-0.5
    for name, parameter in ours.items():
        if name not in theirs:
            assert name == "head.weight"
            continue
        if parameter.ndim == 1:
            assert torch.equal(parameter, theirs[name]), name
            continue
        # Two samples of N(0, s) with n elements each: the ratio of their spreads is within 5 of its deviations of 1.
        ratio = float(parameter.detach().std() / theirs[name].std())
        assert abs(ratio - 1) < 5 / math.sqrt(parameter.numel()), (name, ratio)
        assert abs(float(parameter.detach().mean())) < 5 * float(theirs[name].std()) / math.sqrt(parameter.numel())
