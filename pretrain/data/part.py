"""Parts: encoded documents in corpus order on their way into shards. Private files of one build.

Takes arrays -> one file: a JSON line that says where each array lies, then the arrays, so that lengths can be
read without ids.
Invariants: every document ends with its end token on each side; a part is never changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from pretrain.data.trained_parts import split_marks, with_marks
from pretrain.store import Store

_HEADER_BYTES = 1024


class PartInfo(NamedTuple):
    """What the rest of a build knows of a part without opening it: its key and sums over its documents.

    Attributes:
        first: number in the corpus of the first document.
        stop: one behind the number of the last; more than `first + documents` where some are missing.
    """

    key: str
    documents: int
    tokens: int
    source_tokens: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Part:
    """Encoded documents.

    Attributes:
        lengths, ids: of the (target) side, each document with its eos.
        trained: uint8 per id, whether it is a target; empty where all are.
        source_lengths, source_ids: of the source side (pairs), else empty.
        text_bytes: int64 per document, both sides.
        origin: per document, an index in `origins`.
        rest_ends, rest: each document's own piece of a block's JSON, one after the other.
        numbers: places in the corpus, where they do not simply follow `PartInfo.first`; else empty.
        origins: names of the files.
    """

    lengths: np.ndarray
    source_lengths: np.ndarray
    numbers: np.ndarray
    ids: np.ndarray
    trained: np.ndarray
    source_ids: np.ndarray
    text_bytes: np.ndarray
    origin: np.ndarray
    rest_ends: np.ndarray
    rest: np.ndarray
    origins: list[str]

    def save(self, store: Store, key: str) -> None:
        """Writes the file."""
        arrays = {name: getattr(self, name) for name in _ARRAYS} | {
            "origins": np.frombuffer(json.dumps(self.origins).encode(), dtype=np.uint8)
        }
        header = {name: [array.dtype.str, len(array)] for name, array in arrays.items()}
        line = json.dumps(header).encode().ljust(_HEADER_BYTES)
        store.put_stream(
            key, [line, *(np.ascontiguousarray(array).data.cast("B") for array in arrays.values() if len(array))]
        )

    @classmethod
    def load(cls, store: Store, key: str) -> Part:
        """Reads the whole file."""
        data = store.get(key)
        values = {
            name: np.frombuffer(data, dtype=dtype, count=count, offset=offset)
            for name, dtype, count, offset in _layout(data[:_HEADER_BYTES])
        }
        return cls(**{name: values[name] for name in _ARRAYS}, origins=json.loads(values["origins"].tobytes()))

    def marked_ids(self) -> np.ndarray:
        """Ids, with marks where the part says what is trained; see `trained_parts.with_marks`."""
        return with_marks(self.ids, self.trained) if len(self.trained) else self.ids

    def rests(self) -> list[bytes]:
        """`rest` by document."""
        data, ends = self.rest.tobytes(), self.rest_ends.tolist()
        return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def origin_names(self) -> list[str]:
        """The file of each document."""
        names = self.origins
        return [names[number] for number in self.origin.tolist()]


_ARRAYS = tuple(item.name for item in fields(Part) if item.name != "origins")


def load_lengths(store: Store, info: PartInfo) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(corpus numbers, lengths, source lengths) of a part; the last is empty for plain text."""
    layout = _layout(store.get_range(info.key, 0, _HEADER_BYTES))
    found = []
    for name in ("numbers", "lengths", "source_lengths"):
        _, dtype, count, offset = next(item for item in layout if item[0] == name)
        size = np.dtype(dtype).itemsize
        found.append(np.frombuffer(store.get_range(info.key, offset, count * size) if count else b"", dtype=dtype))
    numbers, lengths, source_lengths = found
    return (numbers if len(numbers) else np.arange(info.first, info.stop)), lengths, source_lengths


def _layout(line: bytes) -> list[tuple[str, str, int, int]]:
    """(name, dtype, count, offset in the file) of each array."""
    found, offset = [], _HEADER_BYTES
    for name, (dtype, count) in json.loads(line).items():
        found.append((name, dtype, count, offset))
        offset += np.dtype(dtype).itemsize * count
    return found


class PartBuilder:
    """Collects documents batch by batch; `build` gives the part of all of them."""

    def __init__(self, dtype: str, *, masked: bool = False) -> None:
        """
        Args:
            masked: ids come with marks of what is trained, see `trained_parts.with_marks`.
        """
        self._dtype, self._masked = dtype, masked
        self.clear()

    def clear(self) -> None:
        """Begins another part."""
        self._arrays: dict[str, list[np.ndarray]] = {
            name: [] for name in ("lengths", "ids", "trained", "source_lengths", "source_ids")
        }
        self._text_bytes: list[int] = []
        self._origin: list[int] = []
        self._rests: list[bytes] = []
        self._numbers: list[int] = []
        self._origins: dict[str, int] = {}
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._rests)

    def add(
        self,
        ids: np.ndarray,
        lengths: np.ndarray,
        origins: Sequence[str],
        rests: Sequence[bytes],
        text_bytes: Sequence[int],
        *,
        source: tuple[np.ndarray, np.ndarray] | None = None,
        trained: np.ndarray | None = None,
        numbers: Sequence[int] = (),
    ) -> None:
        """Appends documents; `source` is (ids, lengths) of their source sides, `trained` says which ids are targets."""
        if self._masked:
            ids, trained = split_marks(ids)
        self._arrays["ids"].append(ids.astype(self._dtype))
        self._arrays["lengths"].append(lengths)
        if trained is not None:
            self._arrays["trained"].append(trained)
        if source is not None:
            self._arrays["source_ids"].append(source[0].astype(self._dtype))
            self._arrays["source_lengths"].append(source[1])
        known = self._origins
        self._origin += [known.setdefault(origin, len(known)) for origin in origins]
        self._rests += rests
        self._text_bytes += text_bytes
        self._numbers += numbers
        self.tokens += len(ids)

    def build(self) -> Part:
        def joined(name: str, dtype: str) -> np.ndarray:
            arrays = self._arrays[name]
            return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype=dtype)

        return Part(
            lengths=joined("lengths", "<i8"),
            source_lengths=joined("source_lengths", "<i8"),
            numbers=np.array(self._numbers, dtype="<i8"),
            ids=joined("ids", self._dtype),
            trained=joined("trained", "u1"),
            source_ids=joined("source_ids", self._dtype),
            text_bytes=np.array(self._text_bytes, dtype="<i8"),
            origin=np.array(self._origin, dtype="<i8"),
            rest_ends=np.cumsum([len(rest) for rest in self._rests], dtype="<i8"),
            rest=np.frombuffer(b"".join(self._rests), dtype=np.uint8),
            origins=list(self._origins),
        )


class PartList:
    """The parts of a split in corpus order, and where each lies."""

    def __init__(self, parts: Sequence[PartInfo]) -> None:
        self.parts = list(parts)
        self._tokens = np.cumsum([part.tokens for part in parts], dtype=np.int64)
        self._stops = np.array([part.stop for part in parts], dtype=np.int64)
        self._firsts = np.array([part.first for part in parts], dtype=np.int64)

    @property
    def tokens(self) -> int:
        return int(self._tokens[-1]) if self.parts else 0

    @property
    def documents(self) -> int:
        return sum(part.documents for part in self.parts)

    @property
    def stop(self) -> int:
        """One behind the last document's number in the corpus."""
        return self.parts[-1].stop if self.parts else 0

    def of_tokens(self, first: int, stop: int) -> tuple[list[PartInfo], int]:
        """The parts that hold tokens first..stop-1 of the concatenated corpus, and how many of the first to skip."""
        low = int(np.searchsorted(self._tokens, first, side="right"))
        high = int(np.searchsorted(self._tokens, stop, side="left")) + 1
        return self.parts[low:high], first - (int(self._tokens[low - 1]) if low else 0)

    def of_documents(self, first: int, stop: int) -> list[PartInfo]:
        """The parts that hold documents numbered first..stop-1."""
        low = int(np.searchsorted(self._stops, first, side="right"))
        return self.parts[low : int(np.searchsorted(self._firsts, stop, side="left"))]


def number_parts(parts: Iterable[tuple[str, int, int, int]]) -> list[PartInfo]:
    """Parts of documents that follow each other: (key, documents, tokens, source tokens) each."""
    numbered, first = [], 0
    for key, documents, tokens, source_tokens in parts:
        numbered.append(PartInfo(key, documents, tokens, source_tokens, first, first + documents))
        first += documents
    return numbered


def part_infos(values: Sequence[Sequence[Any]]) -> list[PartInfo]:
    """From JSON."""
    return [PartInfo(*value) for value in values]
