"""Reads raw text of any kind: a reader per format, found by the file's suffix or as the spec says.

Takes a `SourceSpec` -> gives `Document`s in a fixed order (inputs as given, directories sorted), and
counts what was skipped or repaired in `ReadCounts`.
Invariants: nothing is dropped without a count; a document with text always has text on each side;
text that is no UTF-8 stops the read (or is skipped and counted, if asked), naming file and offset.
A new format is a reader file and a line in `_READERS` and in `inputs.SUFFIXES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pretrain.data.documents import Document, DocumentMaker, Format, ReadCounts, SourceSpec, check_fields_seen
from pretrain.data.inputs import InputFile, expand_braces, format_of, list_files
from pretrain.data.read_lines import read_jsonl, read_text
from pretrain.data.read_table import read_arrow, read_parquet
from pretrain.data.read_tar import read_tar

__all__ = [
    "Document",
    "InputFile",
    "ReadCounts",
    "SourceSpec",
    "expand_braces",
    "list_files",
    "read_documents",
    "read_file",
]

_READERS: dict[Format, Callable[[InputFile, DocumentMaker], Iterator[Document]]] = {
    "text": read_text,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "tar": read_tar,
}


def read_documents(spec: SourceSpec, counts: ReadCounts | None = None) -> Iterator[Document]:
    """All documents of a spec.

    Raises:
        DataError: an input names nothing, a file cannot be read or is not what its format says, or a field
            that is asked for never occurs.
        StoreError: a server failed.
        UserError: the package that reads a format is missing.
    """
    counts = counts if counts is not None else ReadCounts()
    for file in list_files(spec):
        yield from read_file(file, spec, counts)
    check_fields_seen(spec, counts)


def read_file(file: InputFile, spec: SourceSpec, counts: ReadCounts) -> Iterator[Document]:
    """The documents with text of one file, counted. Raises as `read_documents`."""
    counts.files += 1
    reader = _READERS[format_of(file, spec)]
    for document in reader(file, DocumentMaker(file.origin, spec, counts)):
        if not document.text.strip() or (document.target is not None and not document.target.strip()):
            counts.empty += 1
            continue
        counts.documents += 1
        yield document
