"""Ids of texts word by word: what a word becomes is asked of the tokenizer once and remembered.

Takes texts -> gives their ids as bytes of native uint32, or None for a text that holds characters whose class may
differ between versions of Unicode: the library itself must encode that one.
Holds for tokenizers that cut text with GPT-2's pattern and encode each piece by itself (`fits`): the ids of a text
are then those of its pieces, one after the other.
Invariants: memory is two generations of words and the words of one call; safe to call from several threads.
Source: the pattern of GPT-2 (Radford et al. 2019, `encoder.py`) as `tokenizers` has it in its ByteLevel.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

_REMEMBERED = 2**20  # about 2^16 words of English, 13 MB
# Latin, Greek and Cyrillic with their marks; punctuation, currency: old enough to be the same in every table.
_CHARACTERS = [chr(code) for code in (*range(0x0530), *range(0x2000, 0x2100))]
_KNOWN = re.compile("[\0-\u052f\u2000-\u20ff]*")


def _class(holds: Callable[[str], bool]) -> str:
    return "".join(f"\\u{ord(character):04x}" for character in _CHARACTERS if holds(character))


_LETTERS = _class(lambda character: unicodedata.category(character)[0] == "L")
_NUMBERS = _class(lambda character: unicodedata.category(character)[0] == "N")
# Python counts the four separators from U+001C to the spaces, Unicode's White_Space does not.
_SPACES = _class(lambda character: character.isspace() and not "\x1c" <= character <= "\x1f")
WORD = re.compile(
    rf"'s|'t|'re|'ve|'m|'ll|'d| ?[{_LETTERS}]+| ?[{_NUMBERS}]+| ?[^{_SPACES}{_LETTERS}{_NUMBERS}]+"
    rf"|[{_SPACES}]+(?![^{_SPACES}])|[{_SPACES}]+"
)


def fits(parts: dict[str, Any]) -> bool:
    """Whether a tokenizer.json encodes the pieces of `WORD` each by itself, and the same way each time."""
    model, cut = parts["model"], parts.get("pre_tokenizer") or {}
    return (
        parts.get("normalizer") is None
        and cut.get("type") == "ByteLevel"
        and not cut.get("add_prefix_space", True)
        and cut.get("use_regex", True)
        and model.get("type") in ("BPE", "Unigram")
        and not model.get("dropout")
        and all(token["special"] for token in parts.get("added_tokens", []))  # others cut the text before
    )


class WordEncoder:
    """Texts to ids by way of remembered words."""

    def __init__(self, ask: Callable[[list[str]], list[bytes]], *, remembered: int = _REMEMBERED) -> None:
        """
        Args:
            ask: gives the ids of each of some texts; hears words that are not known.
            remembered: size of a generation of words, in characters and 8 more for each word.
        """
        self._ask, self._remembered = ask, remembered
        self._young: dict[str, bytes] = {}
        self._old: dict[str, bytes] = {}
        self._size = 0  # of the young
        self._lock = Lock()

    def encode(self, texts: Sequence[str]) -> list[bytes | None]:
        """The ids of each text; None where the library must be asked for the whole."""
        cut = [WORD.findall(text) if text.isascii() or _KNOWN.fullmatch(text) else None for text in texts]
        get = self._with(set[str]().union(*filter(None, cut))).__getitem__
        return [None if words is None else b"".join(map(get, words)) for words in cut]

    def _with(self, wanted: set[str]) -> dict[str, bytes]:
        """A dictionary that holds at least these words; only ever added to, so that it is read without the lock."""
        with self._lock:
            young, old = self._young, self._old
            missing = [word for word in wanted if word not in young]
            unknown = [word for word in missing if word not in old]
            ids = self._ask(unknown) if unknown else []
            young.update({word: old[word] for word in missing if word in old})
            young.update(zip(unknown, ids, strict=True))
            self._size += sum(map(len, missing)) + 8 * len(missing)
            if self._size > self._remembered:
                # One call may bring a document of any size: its words are not kept.
                self._old = young if self._size <= 2 * self._remembered else {}
                self._young, self._size = {}, 0
            return young
