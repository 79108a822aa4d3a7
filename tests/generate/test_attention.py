"""What `pretrain inspect attention` shows: tokens beside maps, a target where none is given, and refusals."""

from __future__ import annotations

import io
import math

import pytest
import torch
from PIL import Image

from pretrain.config.schema import PrefixLMObjective
from pretrain.data.tokenizer import Tokenizer, train_bpe
from pretrain.errors import UserError
from pretrain.generate.attention import inspect_attention
from pretrain.generate.text import Writer
from pretrain.metrics.attention_plot import EntropyGrid, HeadPicture, draw_attention
from pretrain.model.registry import build_model
from tests.generate.test_text import _config as config_of


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(["the cat sat on the mat, the dog sat on the log"] * 3, 270)


def test_words_stand_beside_the_maps_on_both_sides(tokenizer: Tokenizer) -> None:
    config = config_of("encoder_decoder", tokenizer.vocabulary_size)
    model = build_model(config.model, config.loss, seed=1).eval()
    found = inspect_attention(Writer(model, config.model, tokenizer), "the cat", "the dog sat")
    names = [item.name for item in found.maps]
    assert names == ["encoder.0", "decoder.0", "cross.0"]
    source = len(tokenizer.encode_batch(["the cat"])[0]) + 1  # and the end-of-text id
    target = len(tokenizer.encode_batch(["the dog sat"])[0]) + 1  # after the start id
    shapes = {item.name: tuple(item.weights.shape[1:]) for item in found.maps}
    assert shapes == {"encoder.0": (source, source), "decoder.0": (target, target), "cross.0": (target, source)}
    for item in found.maps:
        queries, keys = found.labels(item)
        assert (len(queries), len(keys)) == shapes[item.name]
    assert "".join(found.words[1:]) == "the dog sat"


def test_a_prompt_is_seen_as_its_objective_trained_it(tokenizer: Tokenizer) -> None:
    config = config_of("decoder", tokenizer.vocabulary_size)
    model = build_model(config.model, config.loss, seed=1).eval()
    above = {}
    for objective in (None, PrefixLMObjective()):
        (found,) = inspect_attention(Writer(model, config.model, tokenizer, objective), "the cat sat").maps
        assert found.name == "decoder.0"
        above[objective] = float(found.weights.triu(1).sum())
        torch.testing.assert_close(found.weights.sum(-1), torch.ones_like(found.weights[..., 0]))
    assert above[None] == 0  # no query sees what comes later
    assert above[PrefixLMObjective()] > 0.1
    sides = config_of("encoder_decoder", tokenizer.vocabulary_size)
    pair = build_model(sides.model, sides.loss, seed=1).eval()
    asked = inspect_attention(Writer(pair, sides.model, tokenizer, PrefixLMObjective()), "the cat", "the dog")
    assert asked.source_words is not None
    assert len(asked.source_words) == len(tokenizer.encode_batch(["the cat"])[0])  # a prefix goes on: no end behind it


def test_without_a_target_the_model_writes_one(tokenizer: Tokenizer) -> None:
    config = config_of("encoder_decoder", tokenizer.vocabulary_size)
    model = build_model(config.model, config.loss, seed=1).eval()
    found = inspect_attention(Writer(model, config.model, tokenizer), "the cat")
    assert 1 <= len(found.words) <= 65


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        ("", None, "the prompt is empty"),
        ("cat " * 600, None, "A map is drawn for 512 at most"),
        ("the cat", "the dog", "--target='the dog' has no use. Only encoder-decoders read a target"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tokenizer: Tokenizer, text: str, target: str | None, message: str) -> None:
    config = config_of("decoder", tokenizer.vocabulary_size)
    model = build_model(config.model, config.loss, seed=1).eval()
    with pytest.raises(UserError, match=message):
        inspect_attention(Writer(model, config.model, tokenizer), text, target)


def test_the_picture_draws_any_word_and_many_heads() -> None:
    words = ["$x_1$", " and", "\n", "日本", "a" * 40]
    heads = [HeadPicture(f"decoder.0 head {i}", [[0.2] * 5] * 5, words, words) for i in range(11)]
    picture = draw_attention("run $1", EntropyGrid(["decoder.0"], [[math.nan, *[0.5] * 10]]), heads)
    image = Image.open(io.BytesIO(picture))
    assert image.format == "PNG"
    assert image.width > 900
