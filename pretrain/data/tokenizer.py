"""A tokenizer with its three special ids: text <-> ids.

Takes a Hugging Face `tokenizer.json` (byte-level, or with byte fallback as Llama 2 has; BPE or Unigram), the
directory of one, or text to train one on -> gives ids as NumPy arrays. One that loses text is refused.
Invariants: text is only ever text: a document that spells `<|endoftext|>` is encoded as ordinary
characters (the library would turn it into the special id); no truncation, no padding, no template;
special ids are added by the builder. `sha256` is the hash of the file's bytes, and `save` writes them unchanged.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from pretrain.data.format import Manifest, dtype_for
from pretrain.data.special_tokens import ExtraTokens
from pretrain.data.word_encoder import WordEncoder, fits
from pretrain.errors import DataError

EOS_TOKEN, PAD_TOKEN, START_TOKEN = "<|endoftext|>", "<|pad|>", "<|start|>"
SPECIAL_TOKENS = (EOS_TOKEN, PAD_TOKEN, START_TOKEN)
FILE_NAME = "tokenizer.json"
Kind = Literal["bpe", "unigram"]
_SPACE = "\u2581"  # how tokenizers without byte level write a space
_REMEMBERED_WORDS = 2**16  # by default 10,000, which a corpus soon fills; about 40 MB more
_PROBE = "Größe naïve 日本語 😀 a\n\tb  c <0x41>"

# Spellings in tokenizers of others, first match wins. A missing pad or start falls back to eos:
# padding is known by its place, and T5-like decoders start from any fixed id.
_EOS_NAMES = (EOS_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
_PAD_NAMES = (PAD_TOKEN, "<|finetune_right_pad_id|>", "<pad>", "[PAD]")
_START_NAMES = (START_TOKEN, "<|begin_of_text|>", "<s>", "<bos>")


class Tokenizer:
    """Text to ids and back; also knows how many bytes of text each id spells."""

    def __init__(self, serialised: bytes, where: str) -> None:
        """Parses the bytes of a tokenizer.json; `where` names it in messages.

        Raises:
            DataError: not a tokenizer, one that loses text, or one without an end-of-text token.
        """
        remedy = "Give a byte-level tokenizer.json, or train one with `pretrain tokenizer train`."
        try:
            self._encoder = tokenizers.Tokenizer.from_str(serialised.decode("utf-8"))
            parts: dict[str, Any] = json.loads(serialised)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{where} is not a tokenizer ({error}). {remedy}") from None
        spelling = _spelling(parts.get("decoder"))
        if spelling is None:
            raise DataError(f"{where} is not byte-level, so the bytes of a token are unknown. {remedy}")
        self._num_bytes = spelling
        self._serialised = serialised
        self._where = where
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self._encoder.encode_special_tokens = True
        if isinstance(self._encoder.model, models.BPE | models.Unigram):
            self._encoder.model._resize_cache(_REMEMBERED_WORDS)
        self._words = WordEncoder(self._ask) if fits(parts) else None
        self._special_ids = sorted(item["id"] for item in parts.get("added_tokens", []) if item["special"])
        self.vocabulary_size: int = 1 + max(self._encoder.get_vocab(with_added_tokens=True).values())
        self.sha256: str = hashlib.sha256(serialised).hexdigest()
        eos_id = self._first_id(_EOS_NAMES)
        if eos_id is None:
            raise DataError(f"{where} has no end-of-text token ({', '.join(_EOS_NAMES)}). {remedy}")
        pad_id, start_id = self._first_id(_PAD_NAMES), self._first_id(_START_NAMES)
        self.eos_id: int = eos_id
        self.pad_id: int = eos_id if pad_id is None else pad_id
        self.start_id: int = eos_id if start_id is None else start_id
        self._check_that_text_stays_text()
        if self.decode(self.encode_batch([_PROBE])[0]) != _PROBE:
            raise DataError(f"{where} is not byte-level and loses text: it does not give back {_PROBE!r}. {remedy}")

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Reads a tokenizer.json, or the one in a directory.

        Raises:
            DataError: the file is missing or no usable tokenizer.
        """
        file = tokenizer_file(path)
        try:
            serialised = file.read_bytes()
        except OSError as error:
            raise DataError(
                f"tokenizer={file} cannot be read: {error.strerror}. "
                "Give a tokenizer.json, or train one with `pretrain tokenizer train INPUT --out FILE`."
            ) from None
        return cls(serialised, str(file))

    @property
    def special_ids(self) -> dict[str, int]:
        """Control ids by name: never made from text."""
        return {str(self._encoder.id_to_token(index)): index for index in self._special_ids}

    def save(self, path: str | Path) -> None:
        """Writes the bytes that `sha256` is of, replacing the file at once."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(target.name + ".partial")
        temporary.write_bytes(self._serialised)
        temporary.replace(target)

    def to_bytes(self) -> bytes:
        """The file's bytes."""
        return self._serialised

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, uint32, without any special id."""
        ids, lengths = self.encode_flat(texts)
        return np.split(ids, np.cumsum(lengths)[:-1]) if len(texts) else []

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The same, concatenated: (ids uint32 [sum of lengths], lengths int64 [texts]).

        Raises:
            DataError: a text holds lone surrogates, as Python makes of bytes that are not UTF-8.
        """
        return self._encode(texts, ())

    def encode_ended(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """`encode_flat` with the end token behind each text, counted in its length."""
        return self._encode(texts, (self.eos_id,))

    def _encode(self, texts: Sequence[str], behind: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """`encode_flat` with these ids behind each text."""
        found = [None] * len(texts) if self._words is None else self._words.encode(texts)
        others = [text for text, ids in zip(texts, found, strict=True) if ids is None]
        rest = iter(self._ask(others) if others else ())
        end = array("I", behind).tobytes()
        encoded = [(next(rest) if ids is None else ids) + end for ids in found]
        lengths = np.array([len(ids) for ids in encoded], dtype=np.int64) // 4
        return np.frombuffer(bytearray().join(encoded), dtype=np.uint32), lengths

    def _ask(self, texts: Sequence[str]) -> list[bytes]:
        """Ids of each text by the library, as bytes of uint32."""
        try:
            encodings = self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:  # the library's words for text that has no UTF-8
            raise DataError(
                "the text holds bytes that are not UTF-8. A tokenizer reads Unicode text. Convert it to UTF-8."
            ) from None
        return [array("I", encoding.ids).tobytes() for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids; special ids spell nothing, invalid UTF-8 becomes U+FFFD.

        Raises:
            DataError: an id outside the vocabulary.
        """
        numbers = [int(value) for value in ids]
        for value in numbers:
            if not 0 <= value < self.vocabulary_size:
                raise DataError(f"id {value} is outside the vocabulary 0..{self.vocabulary_size - 1} of {self._where}.")
        return str(self._encoder.decode(numbers, skip_special_tokens=True))

    def byte_lengths(self) -> np.ndarray:
        """int32 [V]: bytes of text that each id spells; 0 for special and unused ids."""
        lengths = np.zeros(self.vocabulary_size, dtype=np.int32)
        for token, index in self._encoder.get_vocab(with_added_tokens=False).items():
            lengths[index] = self._num_bytes(token)
        for index, added in self._encoder.get_added_tokens_decoder().items():
            lengths[index] = 0 if added.special else len(added.content.encode())
        return lengths

    def manifest(self, *, name: str, kind: Literal["tokens", "pairs"], **layout: Any) -> Manifest:
        """The manifest of a source of this tokenizer's ids, without counts.

        Args:
            layout: further fields of `Manifest`.
        """
        return Manifest(
            name=name,
            kind=kind,
            tokenizer_sha256=self.sha256,
            vocabulary_size=self.vocabulary_size,
            dtype=dtype_for(self.vocabulary_size),
            eos_id=self.eos_id,
            pad_id=self.pad_id,
            start_id=self.start_id,
            **layout,
        )

    def _first_id(self, names: Sequence[str]) -> int | None:
        for name in names:
            index = self._encoder.token_to_id(name)
            if index is not None:
                return int(index)
        return None

    def _check_that_text_stays_text(self) -> None:
        names = [self._encoder.id_to_token(index) for index in self._special_ids]
        ids, _ = self.encode_flat([f"a{name}b {name}" for name in names])
        clash = sorted(set(ids.tolist()) & set(self._special_ids))
        if clash:
            raise DataError(
                f"{self._where} turns the text {self._encoder.id_to_token(clash[0])!r} into special id {clash[0]}. "
                "Text must never make a document boundary. Use another tokenizer."
            )


def tokenizer_file(path: str | Path) -> Path:
    """The file itself, also when its directory is named."""
    return Path(path, FILE_NAME) if Path(path).is_dir() else Path(path)


def train_bpe(texts: Iterable[str], vocabulary_size: int) -> Tokenizer:
    """`train` of kind bpe."""
    return train(texts, vocabulary_size, "bpe")


def train(texts: Iterable[str], vocabulary_size: int, kind: Kind, extra: ExtraTokens | None = None) -> Tokenizer:
    """Trains a byte-level tokenizer. The same texts give the same file for bpe; for unigram the library sums in no
    fixed order, so that scores (and with them rare tokens) differ from training to training.

    Args:
        extra: special tokens beside end, padding and start, for objectives that need them.

    Raises:
        DataError: `vocabulary_size` is below 256 and the special tokens, or the text is too little for it.
    """
    special = [*SPECIAL_TOKENS, *(extra or ExtraTokens()).names()]
    if vocabulary_size < 256 + len(special):
        raise DataError(
            f"vocabulary_size={vocabulary_size} is too small. 256 bytes and {len(special)} special tokens need "
            f"{256 + len(special)}. Choose at least that, usually 8192 or more."
        )
    options: dict[str, Any] = {
        "vocab_size": vocabulary_size,
        "special_tokens": special,
        "initial_alphabet": sorted(pre_tokenizers.ByteLevel.alphabet()),
        "show_progress": False,
    }
    bpe = kind == "bpe"
    tokenizer = tokenizers.Tokenizer(models.BPE() if bpe else models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(**options) if bpe else trainers.UnigramTrainer(**options)
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < vocabulary_size:
        raise DataError(
            f"vocabulary_size={vocabulary_size} cannot be reached: the text gives only {tokenizer.get_vocab_size()} "
            "tokens. Give more text or a smaller --vocabulary-size."
        )
    return Tokenizer(tokenizer.to_str(pretty=True).encode(), "the trained tokenizer")


def _spelling(decoder: dict[str, Any] | None) -> Callable[[str], int] | None:
    """How many bytes of text a token's name spells; None where the decoder does not say."""
    parts = [] if decoder is None else _flat(decoder)
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return len  # one character of the name per byte
    if "ByteFallback" not in kinds:
        return None
    return lambda token: 1 if re.fullmatch("<0x[0-9A-F]{2}>", token) else len(token.replace(_SPACE, " ").encode())


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [part for inner in decoder["decoders"] for part in _flat(inner)]
