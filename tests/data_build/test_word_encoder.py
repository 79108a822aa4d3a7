"""Ids by remembered words against those that the library gives the whole text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from pretrain.data.tokenizer import Tokenizer, train
from pretrain.data.word_encoder import WORD, WordEncoder

_SAMPLE = ["it's what they'd say: 'tis 12 34, naïve Größe, ДА λόγος!  \n\tx = [1, 2]\r\n  y"] * 3
_SAMPLE += Path(__file__).read_text(encoding="utf-8").split("\n\n")
_VOCABULARY = 320
_TRAINED = {kind: train(_SAMPLE, _VOCABULARY, kind).to_bytes() for kind in ("bpe", "unigram")}
_OURS = {kind: Tokenizer(data, kind) for kind, data in _TRAINED.items()}
_PIECES = ["a", "it", "'s", "'", "'ll", "12", "²", " ", "  ", "\n", "\t\n", "\x1c", "\x85", "\xa0", "\u2003", "\u2028"]
_PIECES += ["Größe", "e\u0301", "ДА", "λόγος", "!?", "<|endoftext|>", "…", "€", "日本", "😀", "\u0660", "\U0001e900"]


def _library(data: bytes) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer.from_str(data.decode())
    library.encode_special_tokens = True
    return library


def _ids(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [ids.tolist() for ids in tokenizer.encode_batch(texts)]


def _expected(data: bytes, texts: list[str]) -> list[list[int]]:
    return [_library(data).encode(text, add_special_tokens=False).ids for text in texts]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@settings(derandomize=True, deadline=None, max_examples=150)
@given(texts=st.lists(st.lists(st.sampled_from(_PIECES), max_size=12).map("".join), max_size=4))
def test_ids_are_those_of_the_library(kind: str, texts: list[str]) -> None:
    expected = _expected(_TRAINED[kind], texts)
    assert _ids(_OURS[kind], texts) == expected
    assert _ids(_OURS[kind], texts) == expected  # now that its words are known


def test_every_character_that_is_taken_to_be_known_is_cut_as_the_library_cuts_it() -> None:
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for code in (*range(0x530), *range(0x2000, 0x2100)):
        one = chr(code)
        text = f"a{one}b1{one}2 {one}.{one}  {one}{one} a'{one}s\n{one}"
        assert WORD.findall(text) == [text[start:stop] for _, (start, stop) in cut.pre_tokenize_str(text)], hex(code)


_ADDED = {
    "id": _VOCABULARY,
    "content": "it what",
    "special": False,
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
}


def _changed(**parts: Any) -> bytes:
    return json.dumps(json.loads(_TRAINED["bpe"]) | parts).encode()


@pytest.mark.parametrize(
    "changed",
    [
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}},
        {"added_tokens": [*json.loads(_TRAINED["bpe"])["added_tokens"], _ADDED]},
    ],
    ids=["normalizer", "no pattern", "added token"],
)
def test_a_tokenizer_that_cuts_otherwise_is_asked_for_whole_texts(changed: dict[str, Any]) -> None:
    data = _changed(**changed)
    texts = ["e\u0301 it what it's", "It what 12  12", " it what"]
    assert _ids(Tokenizer(data, "changed"), texts) == _expected(data, texts)
    assert _expected(data, texts) != _expected(_TRAINED["bpe"], texts)


def test_a_tokenizer_that_draws_is_asked_each_time() -> None:
    model = json.loads(_TRAINED["bpe"])["model"] | {"dropout": 0.5}
    tokenizer = Tokenizer(_changed(model=model), "drawing")
    assert len({str(_ids(tokenizer, ["naïve naïve Größe they'd say"])) for _ in range(20)}) > 1


def test_a_word_is_asked_for_once_until_two_generations_have_passed() -> None:
    asked: list[str] = []

    def ask(words: list[str]) -> list[bytes]:
        asked.extend(sorted(words))
        return [word.encode() for word in words]

    encoder = WordEncoder(ask, remembered=40)  # words of one letter count nine
    assert encoder.encode(["a b", "日", "b a"]) == [b"a b", None, b"b a"]
    assert asked == [" a", " b", "a", "b"]
    assert encoder.encode(["a b"]) == [b"a b"]  # the generation has grown old by its fifth word
    encoder.encode(["c"])
    assert asked == [" a", " b", "a", "b", "c"]
    for text in ("a", "defg", "a", "h", "i", "j", "a"):  # what is asked for again stays
        assert encoder.encode([text]) == [text.encode()]
    assert asked.count("a") == 1
    encoder.encode([" b"])
    assert asked.count(" b") == 2
    encoder.encode(["0 1 2 3 4 5 6 7 8 9"])  # one call larger than two generations
    encoder.encode([" 9"])
    assert asked.count(" 9") == 2
