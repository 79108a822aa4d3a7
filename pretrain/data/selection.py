"""Which documents are kept, where they go and in which order: PURE functions of their content.

Takes documents -> gives digests that decide all of it, so that the result depends neither on file
names nor on the number of workers.
  identity    of the content; the same content is a duplicate (with `ordinal`, if duplicates are kept)
  order       keyed by the seed: documents are shuffled by sorting on it
  validation  by the source side alone, without the seed: what is held out stays held out
  selection   the documents of the smallest identities that fit in `max_bytes`
Source: own; BLAKE2b with a person string per purpose.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b

from pretrain.data.sources import Document, ReadCounts, SourceSpec, read_documents
from pretrain.errors import DataError

DIGEST_BYTES = 16
_DOCUMENT = blake2b(digest_size=DIGEST_BYTES, person=b"document")


def identity(text: bytes, target: bytes | None, ordinal: int | None) -> bytes:
    """Digest of a document's content; give `ordinal` to tell equal documents apart."""
    digest = _DOCUMENT.copy()  # two thirds of the time of making one
    digest.update(len(text).to_bytes(8, "little"))
    digest.update(text)
    if target is not None:
        digest.update(target)
    if ordinal is not None:
        digest.update(b"#%d" % ordinal)
    return digest.digest()


def order_key(identity_: bytes, seed: int) -> bytes:
    """Where the document stands in the shuffled corpus."""
    digest = _keyed(seed).copy()
    digest.update(identity_)
    return digest.digest()


@lru_cache(maxsize=8)
def _keyed(seed: int) -> blake2b:
    return blake2b(digest_size=DIGEST_BYTES, key=seed.to_bytes(8, "little"), person=b"order")


def is_validation(text: bytes, fraction: float) -> bool:
    """Whether the document is held out; equal sources are on the same side of the split."""
    digest = blake2b(text, digest_size=8, person=b"validation").digest()
    return int.from_bytes(digest, "big") < fraction * 2.0**64


class Selection:
    """Keeps the documents of the smallest identities whose bytes fit in a budget, in one pass.

    Kept is the longest run from the smallest identity upwards that fits; a document that is larger
    than the whole budget is passed over. Memory: one entry per kept document.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._heap: list[tuple[int, int]] = []  # (-identity, bytes): the largest identity on top
        self._members: set[bytes] = set()
        self._total = 0
        self._limit: bytes | None = None  # the smallest identity that did not fit

    def offer(self, identity_: bytes, num_bytes: int) -> bool:
        """False if the document is certainly not kept; True if it is, so far."""
        if self._max_bytes is None:
            return True
        if num_bytes > self._max_bytes or (self._limit is not None and identity_ >= self._limit):
            return False
        if identity_ in self._members:
            return True
        heapq.heappush(self._heap, (-int.from_bytes(identity_, "big"), num_bytes))
        self._members.add(identity_)
        self._total += num_bytes
        while self._total > self._max_bytes:
            negative, size = heapq.heappop(self._heap)
            self._limit = (-negative).to_bytes(DIGEST_BYTES, "big")
            self._members.discard(self._limit)
            self._total -= size
        return self._limit is None or identity_ < self._limit

    def merge(self, identities: bytes, sizes: Sequence[int]) -> None:
        """Offers what another selection of the same budget keeps, as its `kept` gives it."""
        for number, size in enumerate(sizes):
            self.offer(identities[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES], size)

    def kept(self) -> tuple[bytes, list[int]]:
        """(identities one after the other, bytes of each) of what is kept so far."""
        members = sorted(self._heap, reverse=True)
        return b"".join((-negative).to_bytes(DIGEST_BYTES, "big") for negative, _ in members), [
            size for _, size in members
        ]

    @property
    def limit(self) -> bytes | None:
        """After the last offer: documents with a smaller identity are kept; None keeps all offered."""
        return self._limit


def selected_texts(spec: SourceSpec, max_bytes: int | None, counts: ReadCounts | None = None) -> Iterator[str]:
    """The texts (both sides of pairs) of the documents that a build of the same inputs would keep, each once.

    Reads the inputs twice if there is a budget.

    Raises:
        DataError: as `read_documents`, or no document with text.
    """
    selection = Selection(max_bytes)
    if max_bytes is not None:
        for document in read_documents(spec):
            key, size = _identity_of(document)
            selection.offer(key, size)
    seen: set[bytes] = set()
    for document in read_documents(spec, counts):
        key, size = _identity_of(document)
        too_large = max_bytes is not None and size > max_bytes
        if key in seen or too_large or (selection.limit is not None and key >= selection.limit):
            continue
        seen.add(key)
        yield document.text
        if document.target is not None:
            yield document.target
    if not seen:
        raise nothing_to_build(spec, max_bytes)


def nothing_to_build(spec: SourceSpec, max_bytes: int | None) -> DataError:
    """The error of an empty corpus."""
    budget = "" if max_bytes is None else f" of at most max_bytes={max_bytes}"
    return DataError(
        f"the corpus is empty: {', '.join(spec.inputs)} hold no document with text{budget}. "
        "At least one is needed. Give other inputs, or a larger --max-bytes."
    )


def _identity_of(document: Document) -> tuple[bytes, int]:
    text = document.text.encode()
    target = None if document.target is None else document.target.encode()
    return identity(text, target, None), len(text) + len(target or b"")
