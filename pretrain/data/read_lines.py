"""Readers of plain files: a file is a document (text), or a line is (JSON lines)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import orjson

from pretrain.data.documents import BYTE_ORDER_MARK, Document, DocumentMaker, SourceSpec
from pretrain.data.inputs import InputFile
from pretrain.errors import DataError


def read_text(file: InputFile, maker: DocumentMaker) -> Iterator[Document]:
    """The file as one document. Raises DataError if it is not UTF-8."""
    with file.open() as stream:
        data = stream.read()
    if maker.spec.trained is not None:
        raise DataError(
            f"{file.origin} is plain text. What is trained on is said by a field of a record. Give JSON lines, tables "
            "or tars with .json members."
        )
    text = maker.decode(data.removeprefix(BYTE_ORDER_MARK), file.origin, 0)
    if text is not None:
        yield maker.document(text, None, 0, {})


def read_jsonl(file: InputFile, maker: DocumentMaker) -> Iterator[Document]:
    """A document per line; blank lines are no documents. Raises DataError for a line that is no fitting record."""
    offset, spec = 0, maker.spec
    is_plain = not spec.keep_fields and spec.trained is None  # only text and id are looked at
    with file.open() as stream:
        for line, data in enumerate(stream, start=1):
            record = _plain_record(data, spec) if is_plain else None
            if record is not None:
                offset += len(data)
                yield maker.from_record(record, f"{file.origin}:{line}", line)
                continue
            raw = maker.decode(data.removeprefix(BYTE_ORDER_MARK) if line == 1 else data, file.origin, offset)
            offset += len(data)
            if raw is None or not raw.strip():
                continue
            where = f"{file.origin}:{line}"
            try:
                record = json.loads(raw)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where} is not JSON ({error}). Each line holds one JSON object.") from None
            if not isinstance(record, dict):
                field = (*maker.spec.text_fields, *(maker.spec.trained.other_fields if maker.spec.trained else ()))[0]
                raise DataError(f"{where} is not a JSON object. Each line holds one, with field {field!r}.")
            yield maker.from_record(record, where, line)


def _plain_record(data: bytes, spec: SourceSpec) -> dict[str, Any] | None:
    """The record of a line by a quicker parser; None where Python's could read it otherwise
    (lone surrogates, NaN, large numbers) or has to say what is wrong."""
    try:
        record = orjson.loads(data)
    except ValueError:
        return None
    return record if type(record) is dict and type(record.get(spec.id_field)) is not float else None
