"""Readers of tables: Parquet, and arrow files such as Hugging Face datasets saves to disk.

A row is a document, numbered from 1. pyarrow is an extra (`pretrain[formats]`) and imported here only.
Invariants: only the columns that the spec names are read; a missing text is an empty document, counted; an arrow
stream that ends without the mark of its end is an error (pyarrow takes a cut between two batches for the end).
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Iterator
from typing import Any

from pretrain.data.documents import Document, DocumentMaker
from pretrain.data.inputs import InputFile
from pretrain.errors import DataError, UserError

_ROWS_AT_ONCE = 1024
_FILE_MAGIC = b"ARROW1"  # the arrow file format; the stream format has no magic


def read_parquet(file: InputFile, maker: DocumentMaker) -> Iterator[Document]:
    """Raises DataError if it is no whole Parquet file or lacks a column, UserError without pyarrow."""
    parquet = _pyarrow("pyarrow.parquet", file)

    def batches(stream: io.BufferedIOBase) -> Iterator[Any]:
        table = parquet.ParquetFile(stream)
        columns = _columns(table.schema_arrow, file, maker)
        yield from table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns)

    return _documents(file, maker, batches)


def read_arrow(file: InputFile, maker: DocumentMaker) -> Iterator[Document]:
    """Raises DataError if it is no whole arrow file or lacks a column, UserError without pyarrow."""
    ipc = _pyarrow("pyarrow.ipc", file)

    def batches(stream: io.BufferedIOBase) -> Iterator[Any]:
        magic = stream.read(len(_FILE_MAGIC))
        stream.seek(0)
        asked = None
        if magic == _FILE_MAGIC:
            table = ipc.open_file(stream)
            parts = (table.get_batch(number) for number in range(table.num_record_batches))
        else:
            asked = _Asked(stream)
            table = ipc.open_stream(asked)
            parts = iter(table)
        columns = _columns(table.schema, file, maker)
        for part in parts:
            for start in range(0, part.num_rows, _ROWS_AT_ONCE):
                yield part.slice(start, _ROWS_AT_ONCE).select(columns)
        if asked is not None and asked.beyond_the_end:
            raise _pyarrow("pyarrow", file).ArrowInvalid("it ends without the mark of its end: it was cut")

    return _documents(file, maker, batches)


class _Asked:
    """A file for pyarrow that knows whether more was asked of it than it holds: past its end mark nothing is read."""

    closed = False

    def __init__(self, file: io.BufferedIOBase) -> None:
        self._file = file
        self.beyond_the_end = False

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.beyond_the_end |= len(data) < size
        return data

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        """Left to whoever opened it."""


def _documents(
    file: InputFile, maker: DocumentMaker, batches: Callable[[io.BufferedIOBase], Iterator[Any]]
) -> Iterator[Document]:
    arrow = _pyarrow("pyarrow", file)
    line = 0
    with file.open() as stream:
        try:
            for batch in batches(stream):
                for record in _records(batch, arrow, maker):
                    line += 1
                    where = f"{file.origin} row {line}"
                    decoded = {name: _text(record[name], maker, where) for name in maker.spec.text_fields}
                    if None not in decoded.values():
                        yield maker.from_record(record | decoded, where, line)
        except (arrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # the system's; pyarrow's own have no number
                raise
            raise DataError(f"{file.origin} is damaged after row {line}: {error}. Get the file again.") from None


def _columns(schema: Any, file: InputFile, maker: DocumentMaker) -> list[str]:
    """The columns to read. Raises DataError if a text is missing or none."""
    import pyarrow.types as types

    spec = maker.spec
    for name in spec.text_fields:
        if name not in schema.names:
            maker.text_of(dict.fromkeys(schema.names), name, file.origin)  # raises, naming the columns
        kind = schema.field(name).type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
            raise DataError(f"{file.origin}: column {name!r} is {kind}, not text. Name another with --text-field.")
    marks = () if spec.trained is None else spec.trained.other_fields
    wanted = dict.fromkeys((*spec.text_fields, *marks, spec.id_field, *spec.keep_fields))
    return [name for name in wanted if name in schema.names]


def _records(batch: Any, arrow: Any, maker: DocumentMaker) -> Iterator[dict[str, Any]]:
    """Rows as dicts; texts as bytes, so that what is not UTF-8 is met by our own rules."""
    names, values = batch.schema.names, []
    for name, column in zip(names, batch.columns, strict=True):
        if name in maker.spec.text_fields:
            column = column.cast(arrow.large_string()).cast(arrow.large_binary())
        values.append(column.to_pylist())
    for row in zip(*values, strict=True):
        record = dict(zip(names, row, strict=True))
        # A cell without a value is no field, as in JSON lines; texts stay, so that an empty document is counted.
        yield {name: value for name, value in record.items() if value is not None or name in maker.spec.text_fields}


def _text(value: bytes | None, maker: DocumentMaker, where: str) -> str | None:
    return "" if value is None else maker.decode(value, where)


def _pyarrow(module: str, file: InputFile) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(
            f"{file.origin} needs the package pyarrow, which is not installed. Install it with `pip install pyarrow` "
            "(or `pip install 'pretrain[formats]'`)."
        ) from None
