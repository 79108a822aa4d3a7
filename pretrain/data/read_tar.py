"""Reader of raw WebDataset tars: documents as members, text and JSON under the same name.

`a/1.txt` alone is a document; `a/1.json` beside it brings its id and kept fields; `a/1.json` alone holds
the text in its field. Other members are left out and counted.
Invariants: the document's name is the whole path without the last suffix, so dots and folders in names
keep documents apart; a tar that does not end with its end-of-archive blocks, or has a header that
is wrong anywhere, is an error (the tarfile library ends silently there); a member twice is an error.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from typing import Any

from pretrain.data.documents import BYTE_ORDER_MARK, Document, DocumentMaker
from pretrain.data.inputs import SUFFIXES, InputFile
from pretrain.errors import DataError

_JSON = ".json"


def read_tar(file: InputFile, maker: DocumentMaker) -> Iterator[Document]:
    """The documents of a tar, in its order. Raises DataError if it is damaged or a member is no text."""
    sample = _Sample("", 0)
    with file.open() as stream:
        for name, data in _members(file, stream):
            base, _, suffix = name.rpartition(".")
            suffix = "." + suffix
            if suffix != _JSON and suffix not in SUFFIXES["text"]:
                maker.counts.other_members += 1
                continue
            text_again = suffix != _JSON and sample.text is not None
            if base != sample.name or text_again or (suffix == _JSON and sample.json is not None):
                yield from sample.documents(file, maker)
                sample = _Sample(base, sample.number + 1)
            if suffix == _JSON:
                sample.json = data
            else:
                sample.text = data
    yield from sample.documents(file, maker)


class _Sample:
    """The members of one document."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        self.text: bytes | None = None
        self.json: bytes | None = None

    def documents(self, file: InputFile, maker: DocumentMaker) -> Iterator[Document]:
        """One, or none if there is no text or it is skipped."""
        where = f"{file.origin} member {self.name}"
        record = {}
        if self.json is not None:
            raw = maker.decode(self.json.removeprefix(BYTE_ORDER_MARK), where + _JSON, 0)
            if raw is None:
                return
            try:
                record = json.loads(raw)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}{_JSON} is not JSON ({error}). Such a member holds one JSON object.") from None
            if not isinstance(record, dict):
                raise DataError(f"{where}{_JSON} is not a JSON object. Such a member holds one.")
        spanned = maker.spec.trained is not None and maker.spec.trained.spans is not None
        if self.text is None or maker.spec.pairs or (maker.spec.trained is not None and not spanned):
            if self.json is not None or self.text is not None:
                yield maker.from_record(record, where, self.number, self.name)
            return
        text = maker.decode(self.text.removeprefix(BYTE_ORDER_MARK), where, 0)
        if text is not None and spanned:
            yield maker.marked_document(text, record, where, self.number, self.name)
        elif text is not None:
            yield maker.document(text, None, self.number, record, self.name)


class StrictHeader(tarfile.TarInfo):
    """A header that is wrong, or missing where the archive's end should be marked, is never the end."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Any:
        try:
            return super().fromtarfile(tarfile)
        except _EndOfArchive:
            raise
        except _HeaderError as error:
            raise TarDamage(f"{error} at byte {tarfile.offset}") from None


_HeaderError: type[Exception] = tarfile.HeaderError
_EndOfArchive: type[Exception] = tarfile.EOFHeaderError  # type: ignore[attr-defined]


class TarDamage(Exception):
    """What is wrong with the archive, and where."""


def _members(file: InputFile, stream: io.BufferedIOBase) -> Iterator[tuple[str, bytes]]:
    """Name and content of each regular file. Raises DataError for damage of any kind and for a name twice."""
    seen: set[str] = set()
    try:
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=StrictHeader) as archive:
            for info in archive:
                archive.members = []  # type: ignore[attr-defined]  # or the library keeps every header
                if not info.isfile():
                    continue
                if info.name in seen:
                    raise DataError(
                        f"{file.origin} holds the member {info.name} twice. A name is one document. Write it again."
                    )
                seen.add(info.name)
                content = archive.extractfile(info)
                assert content is not None
                data = content.read()
                if len(data) != info.size:
                    raise TarDamage(f"member {info.name} is cut off: {len(data)} of {info.size} bytes")
                yield info.name, data
    except (TarDamage, tarfile.TarError) as error:
        after = f" after {len(seen)} members" if seen else ""
        raise DataError(
            f"{file.origin} is damaged{after}: {error}. A tar ends with its end-of-archive blocks. Get the file again."
        ) from None
