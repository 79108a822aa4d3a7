"""Which parts of a document are targets: turns of a conversation, completions of prompts, or named spans. PURE.

Takes a record and a `TrainedParts` -> gives its text in parts, each trained or not. Every part is tokenised by itself,
so that no token spells characters of both kinds, and what a prompt is given as is what a model is asked with.
Source: own; the forms of the fields are those of TRL (`messages`; `prompt` and `completion`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pretrain.errors import DataError

if TYPE_CHECKING:
    from pretrain.data.tokenizer import Tokenizer

DEFAULT_TEMPLATE = "{role}: {content}\n\n"
TRAINED_BIT = 1 << 31  # of an id on its way: this token is a target

ReadText = Callable[[Mapping[str, Any], str, str], str]
"""(record, field, where) -> text; raises DataError where it is none."""


@dataclass(frozen=True, slots=True)
class TrainedParts:
    """One of three forms.

    Attributes:
        messages: field of a list of {"role", "content"}: the content of `roles` is trained, with what the template has
            behind it, so that the end of an answer is learnt.
        prompt, completion: fields of two texts that follow each other; the completion is trained.
        spans: field of [[first, end], ...] in characters of the text field; these are trained.
        template: how a message becomes text; holds {role} and {content}, once each, the role first.
    The end of a document is trained where its last part is.
    """

    messages: str | None = None
    prompt: str | None = None
    completion: str | None = None
    spans: str | None = None
    roles: tuple[str, ...] = ("assistant",)
    template: str = DEFAULT_TEMPLATE

    def __post_init__(self) -> None:
        """Raises DataError for none or several forms, and a template that lacks a place."""
        if (self.prompt is None) != (self.completion is None):
            raise DataError(
                "prompt_field and completion_field go together. A completion is what a prompt is answered with. "
                "Give both --prompt-field and --completion-field, or neither."
            )
        forms = [name for name in ("messages", "prompt", "spans") if getattr(self, name) is not None]
        if len(forms) != 1:
            raise DataError(
                f"trained parts are given as {' and '.join(forms) or 'nothing'}. A source has one form of them. Give "
                "--messages-field, or --prompt-field and --completion-field, or --spans-field."
            )
        before, _, behind = self.template.partition("{content}")
        if (
            before.count("{role}") != 1
            or "{role}" in behind
            or "{content}" in behind
            or "{content}" not in self.template
        ):
            raise DataError(
                f"message_template={self.template!r} does not fit. It holds {{role}} and {{content}}, once each, the "
                f"role first. Set --message-template, such as {DEFAULT_TEMPLATE!r}."
            )

    @property
    def text_fields(self) -> tuple[str, ...]:
        """Fields that must be text; the field of plain text comes with spans."""
        return () if self.prompt is None or self.completion is None else (self.prompt, self.completion)

    @property
    def other_fields(self) -> tuple[str, ...]:
        """Fields of another kind."""
        return tuple(name for name in (self.messages, self.spans) if name is not None)

    def parts(self, record: Mapping[str, Any], text: str | None, read: ReadText, where: str) -> list[tuple[str, bool]]:
        """The document in parts (text, trained).

        Args:
            text: the plain text that spans lie in.

        Raises:
            DataError: a field is missing or not of its form; `where` names the record.
        """
        if self.prompt is not None and self.completion is not None:
            return [(read(record, self.prompt, where), False), (read(record, self.completion, where), True)]
        if self.messages is not None:
            return self._turns(_listed(record, self.messages, where), read, where)
        assert self.spans is not None
        return _cut_spans(text or "", _listed(record, self.spans, where), f"{where}: field {self.spans!r}")

    def _turns(self, messages: Sequence[Any], read: ReadText, where: str) -> list[tuple[str, bool]]:
        before, _, behind = self.template.partition("{content}")
        parts = []
        for number, message in enumerate(messages):
            place = f"{where}: message {number} of {self.messages!r}"
            if not isinstance(message, Mapping):
                raise DataError(f"{place} is {type(message).__name__}. A message is an object. Correct the record.")
            role, content = read(message, "role", place), read(message, "content", place)
            parts += [(before.replace("{role}", role), False), (content + behind, role in self.roles)]
        return parts


def _listed(record: Mapping[str, Any], name: str, where: str) -> Sequence[Any]:
    value = record.get(name)
    if isinstance(value, list):
        return value
    have = ", ".join(sorted(record)) or "none"
    what = f"has no field {name!r} (it has: {have})" if name not in record else f": field {name!r} is no list"
    raise DataError(f"{where} {what}. It says what is trained on. Correct the record or the name of the field.")


def _cut_spans(text: str, spans: Sequence[Any], where: str) -> list[tuple[str, bool]]:
    parts, at = [], 0
    for span in spans:
        numbers = list(span) if isinstance(span, list | tuple) else []
        whole = len(numbers) == 2 and all(isinstance(n, int) and not isinstance(n, bool) for n in numbers)
        if not whole or not at <= numbers[0] < numbers[1] <= len(text):
            raise DataError(
                f"{where} has {span!r} in a text of {len(text)} characters. Spans are [first, end), not empty, in "
                "order, and do not overlap. Correct the record."
            )
        parts += [(text[at : numbers[0]], False), (text[numbers[0] : numbers[1]], True)]
        at = numbers[1]
    return [*parts, (text[at:], False)]


def pack_lengths(parts: Sequence[tuple[str, bool]]) -> bytes:
    """The bytes of each part, with a bit for what is trained, as stored beside a text on its way."""
    values = [2 * len(text.encode()) + trained for text, trained in parts if text]
    return np.array(values, dtype="<u8").tobytes()


def encode_parts(
    tokenizer: Tokenizer, texts: Sequence[bytes], lengths: Sequence[bytes]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids of all texts with eos after each, tokens of each, uint8 whether each token is trained).

    Args:
        lengths: of each text, as `pack_lengths` gives them.

    Raises:
        DataError: the tokenizer does not give back the text of parts.
    """
    pieces: list[str] = []
    flags: list[int] = []
    counts: list[int] = []
    for text, packed in zip(texts, lengths, strict=True):
        at = 0
        values = np.frombuffer(packed, dtype="<u8").tolist()
        for value in values:
            pieces.append(text[at : at + value // 2].decode())
            flags.append(value & 1)
            at += value // 2
        counts.append(len(values))
    ids, sizes = tokenizer.encode_flat(pieces)
    last = np.cumsum(counts) - 1
    stops = np.cumsum(sizes)[last]
    tokens = np.diff(stops, prepend=0)
    _check_spelling(tokenizer, ids, tokens, texts)
    trained = np.repeat(np.array(flags, dtype=np.uint8), sizes)
    ends = np.array(flags, dtype=np.uint8)[last]
    return np.insert(ids, stops, tokenizer.eos_id), tokens + 1, np.insert(trained, stops, ends)


def _check_spelling(tokenizer: Tokenizer, ids: np.ndarray, tokens: np.ndarray, texts: Sequence[bytes]) -> None:
    """Raises DataError where parts do not spell the text: a tokenizer that puts a space before every text."""
    spelt = np.add.reduceat(tokenizer.byte_lengths()[ids], np.cumsum(tokens) - tokens)
    wrong = np.flatnonzero(spelt != [len(text) for text in texts])
    if len(wrong):
        text = texts[int(wrong[0])].decode()
        raise DataError(
            f"the parts of {text[:60]!r} spell {int(spelt[wrong[0]])} bytes, the text has "
            f"{len(texts[int(wrong[0])])}. Trained parts are tokenised one by one, which needs a tokenizer that adds "
            "nothing before a text. Use a byte-level one, such as `pretrain tokenizer train` makes."
        )


def with_marks(ids: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """Ids uint32 with `TRAINED_BIT` where a token is a target, so that both are cut and packed as one."""
    return ids.astype(np.uint32) | trained.astype(np.uint32) << np.uint32(31)


def split_marks(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `with_marks`."""
    return ids & np.uint32(TRAINED_BIT - 1), (ids >> np.uint32(31)).astype(np.uint8)
