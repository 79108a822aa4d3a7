"""Text in, text out, in both families, with a tokenizer trained on the spot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pretrain.config.schema import RunConfig
from pretrain.data.tokenizer import Tokenizer, train_bpe
from pretrain.errors import CheckpointError, UserError
from pretrain.generate.load import load_model
from pretrain.generate.sampling import SamplingOptions
from pretrain.generate.text import Writer, generate_text
from pretrain.model.registry import build_model
from tests.metrics.home import run_config

GREEDY = SamplingOptions()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(["the cat sat on the mat, the dog sat on the log"] * 3, 270)


def _config(family: str, vocabulary_size: int) -> RunConfig:
    values: dict[str, Any] = run_config().model_dump()
    model = {
        "vocabulary_size": vocabulary_size,
        "width": 16,
        "num_heads": 2,
        "feed_forward_width": 24,
        "family": family,
    }
    if family == "decoder":
        values["model"] = {**model, "num_layers": 1, "init_std": 0.5}
    else:
        values["model"] = {**model, "num_encoder_layers": 1, "num_decoder_layers": 1}
        values["objective"] = {"kind": "seq2seq"}
        values["batch"] = {**values["batch"], "source_length": 32}
    return RunConfig.model_validate(values)


@pytest.mark.parametrize("family", ["decoder", "encoder_decoder"])
def test_text_becomes_text_of_at_most_so_many_tokens_and_only_of_known_ids(family: str, tokenizer: Tokenizer) -> None:
    config = _config(family, tokenizer.vocabulary_size + 20)  # padded, as vocabularies often are
    model = build_model(config.model, config.loss, seed=1, activation_checkpointing=False)
    hot = SamplingOptions(temperature=30.0, seed=2)
    written = generate_text(Writer(model, config.model, tokenizer), "the cat", sampling=hot, max_tokens=60)
    assert written.text == tokenizer.decode(written.ids)
    assert max(written.ids) < tokenizer.vocabulary_size
    assert not {tokenizer.eos_id, tokenizer.pad_id, tokenizer.start_id} & set(written.ids)
    assert written.ended == (len(written.ids) < 60)
    again = generate_text(Writer(model, config.model, tokenizer), "the cat", sampling=hot, max_tokens=60)
    assert again == written
    other = generate_text(Writer(model, config.model, tokenizer), "a dog", sampling=hot, max_tokens=60)
    assert other.ids != written.ids


def test_a_special_token_spelt_in_the_prompt_stays_text(tokenizer: Tokenizer) -> None:
    config = _config("decoder", tokenizer.vocabulary_size)
    model = build_model(config.model, config.loss, seed=1, activation_checkpointing=False)
    seen: list[list[int]] = []
    decode = model.decode
    model.decode = lambda ids, *rest: (seen.append(ids.tolist()), decode(ids, *rest))[1]  # type: ignore[assignment]
    generate_text(Writer(model, config.model, tokenizer), "a<|endoftext|>b", sampling=GREEDY, max_tokens=1)
    assert tokenizer.eos_id not in seen[0]


@pytest.mark.parametrize(("family", "word"), [("decoder", "prompt"), ("encoder_decoder", "source")])
def test_an_empty_text_is_refused(family: str, word: str, tokenizer: Tokenizer) -> None:
    config = _config(family, tokenizer.vocabulary_size)
    model = build_model(config.model, config.loss, seed=1, activation_checkpointing=False)
    with pytest.raises(UserError, match=f"the {word} is empty"):
        generate_text(Writer(model, config.model, tokenizer), "", sampling=GREEDY, max_tokens=5)


def test_loaded_weights_are_exactly_those_given_and_a_misfit_is_named() -> None:
    config = _config("decoder", 300)
    trained = build_model(config.model, config.loss, seed=99, activation_checkpointing=False)
    weights = {name: parameter.detach().clone() for name, parameter in trained.named_parameters()}
    model = load_model(config, weights, "step-00000010-a001")
    assert not model.training
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])
    name = next(iter(weights))
    for wrong, text in (
        ({k: v for k, v in weights.items() if k != name}, f"missing: {name}"),
        ({**weights, "extra": torch.zeros(1)}, "unknown: extra"),
        ({**weights, name: torch.zeros(3)}, r"wrong shape: .*\(3,\) instead of"),
    ):
        with pytest.raises(CheckpointError, match=text):
            load_model(config, wrong, "step-00000010-a001")
