"""Reads raw text: files, directory trees, globs, JSON lines; each optionally gzipped.

Takes a `SourceSpec` -> gives `Document`s in a fixed order (inputs as given, directories sorted), and
counts what was skipped or repaired in `ReadCounts`. Inputs are raw material outside any store.
Invariants: nothing is dropped without a count; a document with text always has text on each side;
text that is no UTF-8 stops the read (or is skipped and counted, if asked), naming file and offset.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pretrain.data.format import document_id
from pretrain.errors import DataError

Format = Literal["auto", "text", "jsonl"]
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
_BOM = b"\xef\xbb\xbf"
_MAX_BRACES = 100_000


class Document(NamedTuple):
    """One document of raw text; `target` is the other side of a pair, None for plain text."""

    id: str
    text: str
    target: str | None
    origin: str
    line: int


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """What to read.

    Attributes:
        inputs: files, directories, globs (`**`, `{a,b}`, `{00..12}`).
        format: auto decides per file by its suffix.
        text_field: JSON field of plain text (jsonl).
        source_field, target_field: JSON fields of a pair (jsonl); both or none.
        include: name patterns of files taken from directories; empty means the known suffixes.
        skip_invalid: files and lines that are not UTF-8 are skipped and counted instead of an error.
    """

    inputs: tuple[str, ...]
    format: Format = "auto"
    text_field: str = "text"
    source_field: str | None = None
    target_field: str | None = None
    include: tuple[str, ...] = ()
    skip_invalid: bool = False

    def __post_init__(self) -> None:
        if (self.source_field is None) != (self.target_field is None):
            raise DataError(
                "source_field and target_field go together. A pair has two sides. "
                "Give both --source-field and --target-field, or neither."
            )

    @property
    def pairs(self) -> bool:
        return self.target_field is not None


@dataclass(slots=True)
class ReadCounts:
    """What reading met, filled while `read_documents` runs."""

    files: int = 0
    documents: int = 0
    empty: int = 0
    invalid: int = 0
    repaired: int = 0
    invalid_examples: list[str] = field(default_factory=list)


def list_files(spec: SourceSpec) -> list[Path]:
    """The files of a spec, each once, in reading order.

    Raises:
        DataError: an input names nothing, or a directory holds no fitting file.
    """
    files: dict[Path, None] = {}
    for given in spec.inputs:
        for name in [given] if os.path.exists(given) else expand_braces(given):
            files.update(dict.fromkeys(_files_of(name, given, spec)))
    return list(files)


def read_documents(spec: SourceSpec, counts: ReadCounts | None = None) -> Iterator[Document]:
    """All documents of a spec.

    Raises:
        DataError: an input names nothing, a file cannot be read or is not what its format says.
    """
    counts = counts if counts is not None else ReadCounts()
    for path in list_files(spec):
        counts.files += 1
        reader = _read_jsonl if _is_jsonl(path, spec) else _read_text
        for document in reader(path, spec, counts):
            if not document.text.strip() or (document.target is not None and not document.target.strip()):
                counts.empty += 1
                continue
            counts.documents += 1
            yield document


def expand_braces(pattern: str) -> list[str]:
    """`a{b,c}` -> ab, ac; `s-{08..10}` -> s-08, s-09, s-10; other braces stay as they are."""
    for match in re.finditer(r"\{([^{}]*)\}", pattern):
        inner = match[1]
        numbers = re.fullmatch(r"(\d+)\.\.(\d+)", inner)
        if numbers:
            first, last = int(numbers[1]), int(numbers[2])
            if last - first > _MAX_BRACES:
                raise DataError(f"input {pattern!r} expands to {last - first + 1} names. Give a directory or a glob.")
            choices = [str(value).zfill(len(numbers[1])) for value in range(first, last + 1)]
        elif "," in inner:
            choices = inner.split(",")
        else:
            continue
        head, tail = pattern[: match.start()], pattern[match.end() :]
        return [text for choice in choices for text in expand_braces(head + choice + tail)]
    return [pattern]


def _files_of(name: str, given: str, spec: SourceSpec) -> list[Path]:
    path = Path(name)
    if path.is_dir():
        found = _walk(path, spec)
        if not found:
            wanted = ", ".join(spec.include or (*TEXT_SUFFIXES, *JSONL_SUFFIXES))
            raise DataError(
                f"input {name!r} holds no fitting file ({wanted}). Name other files with --include '*.ext'."
            )
        return found
    if path.exists():
        return [path]
    found = [match for match in map(Path, sorted(glob.glob(name, recursive=True))) if match.is_file()]
    if not found:
        expanded = "" if name == given else f" (from {given!r})"
        raise DataError(f"input {name!r}{expanded} matches no file. Give files, directories or a pattern that matches.")
    return found


def _walk(directory: Path, spec: SourceSpec) -> list[Path]:
    """Fitting files below a directory, sorted; hidden ones and links to directories are left out."""

    def failed(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}. Correct its permissions.") from None

    found = []
    for root, folders, names in os.walk(directory, onerror=failed):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(root, name) for name in names if not name.startswith(".") and _fits(name, spec)]
    return sorted(path for path in found if path.is_file())


def _fits(name: str, spec: SourceSpec) -> bool:
    if spec.include:
        return any(fnmatch(name, pattern) for pattern in spec.include)
    suffixes = {"auto": TEXT_SUFFIXES + JSONL_SUFFIXES, "text": TEXT_SUFFIXES, "jsonl": JSONL_SUFFIXES}[spec.format]
    return name.removesuffix(".gz").endswith(suffixes)


def _is_jsonl(path: Path, spec: SourceSpec) -> bool:
    name = path.name.removesuffix(".gz")
    jsonl = spec.format == "jsonl" or (spec.format == "auto" and name.endswith(JSONL_SUFFIXES))
    if spec.pairs and not jsonl:
        raise DataError(
            f"{path} is not JSON lines. Pairs are read from .jsonl files. Give --format jsonl if it is one."
        )
    if spec.format == "auto" and not jsonl and not name.endswith(TEXT_SUFFIXES) and not _fits_include(name, spec):
        raise DataError(f"format=auto cannot tell what {path} is. Give --format text or --format jsonl.")
    return jsonl


def _fits_include(name: str, spec: SourceSpec) -> bool:
    return any(fnmatch(name, pattern) for pattern in spec.include)


def _open(path: Path) -> io.BufferedIOBase:
    return gzip.GzipFile(path, "rb") if path.name.endswith(".gz") else path.open("rb")


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, with read failures named."""
    try:
        with _open(path) as file:
            yield from file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}. Get the file again.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Correct the path or its permissions.") from None


def _read_text(path: Path, spec: SourceSpec, counts: ReadCounts) -> Iterator[Document]:
    text = _decode(b"".join(_lines(path)).removeprefix(_BOM), path, 0, spec, counts)
    if text is not None:
        origin = path.as_posix()
        yield Document(document_id(origin, 0), text, None, origin, 0)


def _read_jsonl(path: Path, spec: SourceSpec, counts: ReadCounts) -> Iterator[Document]:
    origin = path.as_posix()
    offset = 0
    for line, data in enumerate(_lines(path), start=1):
        raw = _decode(data.removeprefix(_BOM) if line == 1 else data, path, offset, spec, counts)
        offset += len(data)
        if raw is None or not raw.strip():
            continue
        try:
            record = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{line} is not JSON ({error}). Each line holds one JSON object.") from None
        if not isinstance(record, dict):
            raise DataError(f"{path}:{line} is not a JSON object. Each line holds one, with field {spec.text_field!r}.")
        target = None
        if spec.source_field is not None and spec.target_field is not None:
            text = _text_of(record, spec.source_field, path, line, counts)
            target = _text_of(record, spec.target_field, path, line, counts)
        else:
            text = _text_of(record, spec.text_field, path, line, counts)
        own_id = record.get("id")
        name = str(own_id) if isinstance(own_id, str | int) and own_id != "" else document_id(origin, line)
        yield Document(_repair(name, counts), text, target, origin, line)


def _text_of(record: dict[str, Any], name: str, path: Path, line: int, counts: ReadCounts) -> str:
    value = record.get(name)
    if isinstance(value, str):
        return _repair(value, counts)
    if name not in record:
        have = ", ".join(sorted(record)) or "none"
        raise DataError(
            f"{path}:{line} has no field {name!r} (it has: {have}). "
            "Name the right one with --text-field, or --source-field and --target-field for pairs."
        )
    raise DataError(f"{path}:{line}: field {name!r} is {type(value).__name__}, not text. Correct the line.")


def _repair(text: str, counts: ReadCounts) -> str:
    """JSON may hold lone surrogates (`"\\ud800"`), which no UTF-8 can: they become U+FFFD, counted."""
    try:
        text.encode()
    except UnicodeEncodeError:
        counts.repaired += 1
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _decode(data: bytes, path: Path, offset: int, spec: SourceSpec, counts: ReadCounts) -> str | None:
    """UTF-8 -> text; None if it is not UTF-8 and the spec says to skip."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"{path} at byte {offset + error.start}"
        if not spec.skip_invalid:
            raise DataError(
                f"{where} is not UTF-8 (0x{data[error.start]:02x}). Text is read as UTF-8. "
                "Convert the file, or skip such files with --invalid-utf8 skip."
            ) from None
    counts.invalid += 1
    if len(counts.invalid_examples) < 5:
        counts.invalid_examples.append(where)
    return None
