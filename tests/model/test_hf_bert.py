"""The encoder against transformers' BertForMaskedLM, both ways."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from pretrain.config.schema import EncoderConfig, LossConfig
from pretrain.errors import UserError
from pretrain.model.flops import parameter_counts
from pretrain.model.hf.directory import export_model, import_model
from pretrain.model.hf.family import ExportOptions
from pretrain.model.registry import build_model
from tests.model.small import encoder_config, masked_batch
from tests.model.their_gradients import assert_gradients_equal


def build(config: EncoderConfig) -> torch.nn.Module:
    model = build_model(config, LossConfig(), seed=5).eval()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases and norms away from 0 and 1, so that a swap would show
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_encoder_gives_the_same_logits_and_gradients_in_transformers(tmp_path: Path, tied: bool) -> None:
    config = encoder_config(tied_embeddings=tied, init_std=0.2)
    model = build(config)
    export_model(dict(model.named_parameters()), config, tmp_path / "hf", ExportOptions(32))
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    assert type(theirs).__name__ == "BertForMaskedLM"
    batch = masked_batch([24])
    output = theirs(batch.decoder_ids[None], labels=batch.labels[None])
    with torch.no_grad():
        ours = model.logits(batch)
    largest = output.logits.abs().max().item()
    assert largest > 0.5  # else agreement would mean nothing
    torch.testing.assert_close(ours, output.logits[0].detach(), atol=1e-5 * largest, rtol=0)
    output.loss.backward()
    (model(batch).objective / batch.target_tokens).backward()
    theirs.bert.embeddings.token_type_embeddings.weight.grad = None  # an import adds this row to the positions
    assert_gradients_equal(model, theirs, tmp_path / "gradients")


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_saved_by_transformers_gives_the_same_logits_here(tmp_path: Path, tied: bool) -> None:
    hf_config = transformers.BertConfig(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=40, initializer_range=0.2, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(3)
    theirs = transformers.BertForPreTraining(hf_config).eval()  # with a pooler and a second head, as published ones
    torch.nn.init.normal_(theirs.cls.predictions.decoder.bias)
    theirs.save_pretrained(tmp_path / "theirs")
    config, state = import_model(tmp_path / "theirs")
    assert isinstance(config, EncoderConfig)
    model = build_model(config, LossConfig(), seed=0).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["head.weight"] if tied else [], [])
    lengths = (7, 17)
    batch = masked_batch(lengths)
    with torch.no_grad():
        expected = [theirs(ids[None]).prediction_logits[0] for ids in batch.decoder_ids.split(lengths)]
        right = torch.cat(expected)
        torch.testing.assert_close(model.logits(batch), right, atol=1e-5 * right.abs().max().item(), rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_export_then_import_gives_equal_weights_and_config(tmp_path: Path, tied: bool) -> None:
    config = encoder_config(tied_embeddings=tied, dropout=0.1)
    state = {name: tensor.detach() for name, tensor in build(config).named_parameters()}
    export_model(state, config, tmp_path / "hf", ExportOptions(32, pad_id=1))
    back_config, back = import_model(tmp_path / "hf")
    assert back_config == config
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    stored = load_file(tmp_path / "hf/model.safetensors")
    assert ("cls.predictions.decoder.weight" in stored) == (not tied)


def test_a_published_size_has_the_published_parameters() -> None:
    hf = transformers.BertConfig()
    with torch.device("meta"):
        theirs = transformers.BertForMaskedLM(hf)
    config = EncoderConfig(
        vocabulary_size=30522, width=768, num_heads=12, feed_forward_width=3072, num_layers=12, max_length=512
    )
    segments = 2 * 768
    assert parameter_counts(config).total + segments == sum(parameter.numel() for parameter in theirs.parameters())


def test_an_import_names_what_the_encoder_lacks(tmp_path: Path) -> None:
    hf_config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        hidden_act="relu",
    )  # fmt: skip
    transformers.BertForMaskedLM(hf_config).save_pretrained(tmp_path / "theirs")
    with pytest.raises(UserError, match=r"hidden_act=relu cannot be imported\. model\.family=encoder"):
        import_model(tmp_path / "theirs")
