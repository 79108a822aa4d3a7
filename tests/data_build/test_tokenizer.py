from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.build import build
from pretrain.data.special_tokens import ExtraTokens
from pretrain.data.tokenizer import SPECIAL_TOKENS, Tokenizer, train, train_bpe
from pretrain.errors import DataError
from tests.data_build.corpus import documents_in, text_options, write_jsonl


def _changed(path: str, **parts: Any) -> bytes:
    return json.dumps(json.loads(Path(path).read_bytes()) | parts).encode()


@pytest.mark.parametrize("text", ["a<|endoftext|>b", "<|pad|>", "x <|start|> y", "</s>", "<extra_id_0>"])
def test_text_that_spells_a_special_token_stays_text(tokenizer: Tokenizer, text: str) -> None:
    (ids,) = tokenizer.encode_batch([text])
    assert not {0, 1, 2} & set(ids.tolist())
    assert tokenizer.decode(ids) == text


@settings(derandomize=True, deadline=None, max_examples=50)
@given(text=st.text())
def test_any_text_comes_back_and_its_ids_spell_its_bytes(text: str) -> None:
    tokenizer = _TRAINED
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_lengths()[ids].sum() == len(text.encode())


_TRAINED = train_bpe(["some text to train on, naïve and größer 日本語"] * 2, 280)


def test_special_ids_spell_nothing_and_come_first(tokenizer: Tokenizer) -> None:
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.start_id) == (0, 1, 2)
    lengths = tokenizer.byte_lengths()
    assert lengths.shape == (tokenizer.vocabulary_size,) == (300,)
    assert lengths.dtype == np.int32
    assert lengths[:3].tolist() == [0, 0, 0]
    assert (lengths[3:] >= 1).all()
    assert tokenizer.decode([0, 1, 2]) == ""


def test_training_is_repeatable_whatever_the_order_of_texts() -> None:
    texts = ["one two three", "two three four", "three four five"] * 5
    first, second = train_bpe(texts, 270), train_bpe(reversed(texts), 270)
    assert first.to_bytes() == second.to_bytes()


def test_save_and_load_keep_bytes_and_hash(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(tmp_path / "a" / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "a" / "tokenizer.json")
    assert loaded.to_bytes() == tokenizer.to_bytes()
    assert loaded.sha256 == tokenizer.sha256
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["tokenizer.json"]


def test_template_truncation_and_padding_of_a_foreign_tokenizer_do_nothing(tokenizer_path: str) -> None:
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|start|>": {"id": "<|start|>", "ids": [2], "tokens": ["<|start|>"]}},
    }
    foreign = Tokenizer(
        _changed(
            tokenizer_path,
            post_processor=template,
            truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
            padding={"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 1,
                     "pad_type_id": 0, "pad_token": "<|pad|>"},
        ),
        "foreign",
    )  # fmt: skip
    texts = ["the quick brown fox", "", "x"]
    own = Tokenizer.load(tokenizer_path).encode_batch(texts)
    for ids, expected in zip(foreign.encode_batch(texts), own, strict=True):
        np.testing.assert_array_equal(ids, expected)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "is not byte-level"),
        ({"decoder": None}, "is not byte-level"),
        ({"model": {"type": "nonsense"}}, "is not a tokenizer"),
    ],
)
def test_an_unfit_tokenizer_is_refused(tokenizer_path: str, parts: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Tokenizer(_changed(tokenizer_path, **parts), "odd.json")


def test_a_tokenizer_whose_model_makes_special_ids_from_text_is_refused(tokenizer_path: str) -> None:
    body = json.loads(Path(tokenizer_path).read_bytes())
    body["model"]["ignore_merges"] = True  # whole words are looked up in the vocabulary, where specials are words
    body["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    with pytest.raises(DataError, match="turns the text"):
        Tokenizer(json.dumps(body).encode(), "odd.json")


def test_a_missing_tokenizer_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer=.*none.json cannot be read.*pretrain tokenizer train"):
        Tokenizer.load(tmp_path / "none.json")


@pytest.mark.parametrize(("size", "message"), [(258, "is too small"), (5000, "cannot be reached")])
def test_a_vocabulary_that_cannot_be_made_is_refused(size: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        train_bpe(["a few words only"], size)


def test_an_id_outside_the_vocabulary_is_refused_when_decoding(tokenizer: Tokenizer) -> None:
    for value in (300, -1):
        with pytest.raises(DataError, match=f"id {value} is outside the vocabulary 0..299"):
            tokenizer.decode([5, value])


def test_special_names_are_those_that_every_part_of_the_product_expects() -> None:
    assert SPECIAL_TOKENS == ("<|endoftext|>", "<|pad|>", "<|start|>")


def test_text_that_is_not_utf_8_is_named_so(tokenizer: Tokenizer) -> None:
    for text in (b"a \xff b".decode(errors="surrogateescape"), "\ud800"):
        with pytest.raises(DataError, match="not UTF-8"):
            tokenizer.encode_batch(["good", text])


def test_a_unigram_tokenizer_keeps_the_promises_of_a_bpe_one() -> None:
    texts = Path(__file__).read_text().split("\n\n")
    first = train(texts, 350, "unigram")
    assert json.loads(first.to_bytes())["model"]["type"] == "Unigram"
    assert (first.eos_id, first.pad_id, first.start_id, first.vocabulary_size) == (0, 1, 2, 350)
    for text in (*texts[:3], "a<|endoftext|>b", "日本語 😀 \0 \r\n", " two  spaces "):
        (ids,) = first.encode_batch([text])
        assert not {0, 1, 2} & set(ids.tolist())
        assert first.decode(ids) == text
        assert first.byte_lengths()[ids].sum() == len(text.encode())
    assert first.encode_flat(texts)[0].size < 0.8 * sum(map(len, texts))


def _llama_like() -> bytes:
    """The parts of Llama 2's tokenizer.json, with a small vocabulary."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        *"theabc",
        "th",
        "the",
        "\u2581the",
    ]
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [
                {"id": i, "content": words[i], "single_word": False, "lstrip": False, "rstrip": False,
                 "normalized": False, "special": True}
                for i in range(3)
            ],
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ]},
            "pre_tokenizer": None,
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
            },
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ]},
            "model": {
                "type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True,
                "vocab": {word: i for i, word in enumerate(dict.fromkeys(words))},
                "merges": ["t h", "th e", "\u2581 the"],
            },
        }
    ).encode()  # fmt: skip


def test_a_directory_of_a_tokenizer_with_byte_fallback_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(_llama_like())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.eos_id, tokenizer.start_id) == (2, 1)
    for text in ("the cat", "größe <s> </s>", "日本語\n"):
        (ids,) = tokenizer.encode_batch([text])
        assert not {0, 1, 2} & set(ids.tolist())
        assert tokenizer.decode(ids) == text
        assert tokenizer.byte_lengths()[ids].sum() == len(f" {text}".encode())  # it puts a space before every text
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path / "empty")


def test_a_tokenizer_that_loses_text_is_refused() -> None:
    body = json.loads(_llama_like())
    body["normalizer"]["normalizers"].insert(0, {"type": "Lowercase"})
    with pytest.raises(DataError, match="loses text: it does not give back"):
        Tokenizer(json.dumps(body).encode(), "lower.json")


def test_every_document_ends_with_exactly_one_end_and_begins_with_no_template(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(_llama_like())
    texts = ["the a", "the b </s>", "<s> the c"]
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    build(text_options(tmp_path / "a.jsonl", tmp_path / "out", str(tokenizer)))
    loaded = Tokenizer.load(tokenizer)
    documents = documents_in(tmp_path / "out", loaded.eos_id)
    assert sorted(loaded.decode(ids) for ids in documents) == sorted(texts)
    assert not {0, 1, 2} & {token for ids in documents for token in ids}


def test_control_tokens_for_objectives_are_added_on_demand_and_stay_out_of_text() -> None:
    extra = ExtraTokens(sentinels=3, fill_in_the_middle=True, modes=True)
    tokenizer = train(["the cat sat on the mat"] * 5, 280, "bpe", extra)
    names = [
        "<|endoftext|>", "<|pad|>", "<|start|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",
        "<|mode_r|>", "<|mode_s|>", "<|mode_x|>", "<extra_id_0>", "<extra_id_1>", "<extra_id_2>",
    ]  # fmt: skip
    assert tokenizer.special_ids == {name: number for number, name in enumerate(names)}
    text = "a<extra_id_0>b <|fim_middle|> <|mode_x|>"
    ids = tokenizer.encode_batch([text])[0]
    assert ids.min() >= len(names)
    assert tokenizer.decode(ids) == text
    assert not tokenizer.byte_lengths()[: len(names)].any()
    with pytest.raises(DataError, match=r"vocabulary_size=260 is too small. 256 bytes and 12 special tokens need 268"):
        train(["x"], 260, "bpe", extra)
    with pytest.raises(DataError, match="sentinels=-1 is negative"):
        ExtraTokens(sentinels=-1).names()
