"""What reading raw text is told, what it gives, and what it counts.

Takes a `SourceSpec` -> readers give `Document`s and fill `ReadCounts`. The helpers here are the rules
that all readers share: text is UTF-8, lone surrogates are repaired and counted, ids and kept fields
come from the record.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from pretrain.data.format import document_id
from pretrain.data.trained_parts import TrainedParts, pack_lengths
from pretrain.errors import DataError

Format = Literal["auto", "text", "jsonl", "parquet", "arrow", "tar"]
DEFAULT_ID_FIELD = "id"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Document(NamedTuple):
    """One document of raw text.

    Attributes:
        id: its own id, else file and line.
        text: the document, or the source side of a pair.
        target: the other side of a pair, None for plain text.
        origin: path or URL of its file.
        line: place in the file, from 1: line (jsonl), row (tables), sample (tar); 0 for a whole file.
        metadata: the fields that the spec keeps, None if there are none.
        trained: which bytes of the text are targets, see `trained_parts.pack_lengths`; None: all.
    """

    id: str
    text: str
    target: str | None
    origin: str
    line: int
    metadata: dict[str, Any] | None = None
    trained: bytes | None = None


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """What to read.

    Attributes:
        inputs: files, directories, globs (`**`, `{a,b}`, `{00..12}`), http(s):// and s3:// URLs.
        format: auto decides per file by its suffix.
        text_field: field of plain text (jsonl, parquet, arrow, json members of a tar).
        source_field, target_field: fields of a pair; both or none.
        include: name patterns of files taken from directories; empty means the known suffixes.
        skip_invalid: files and lines that are not UTF-8 are skipped and counted instead of an error.
        id_field: field of a document's id; records without it are named by file and line.
        keep_fields: fields that go into the provenance of every document that has them.
        trained: which parts of a document are targets; None: all of it.
    """

    inputs: tuple[str, ...]
    format: Format = "auto"
    text_field: str = "text"
    source_field: str | None = None
    target_field: str | None = None
    include: tuple[str, ...] = ()
    skip_invalid: bool = False
    id_field: str = DEFAULT_ID_FIELD
    keep_fields: tuple[str, ...] = ()
    trained: TrainedParts | None = None

    def __post_init__(self) -> None:
        if (self.source_field is None) != (self.target_field is None):
            raise DataError(
                "source_field and target_field go together. A pair has two sides. "
                "Give both --source-field and --target-field, or neither."
            )
        if self.pairs and self.trained is not None:
            raise DataError(
                "source_field with trained parts is not supported. Of a pair the whole target is trained, nothing of "
                "its source. Leave out --source-field and --target-field, or the fields of the trained parts."
            )

    @property
    def pairs(self) -> bool:
        return self.target_field is not None

    @property
    def text_fields(self) -> tuple[str, ...]:
        """The fields that must hold text: one, or the two sides of a pair."""
        if self.source_field is not None and self.target_field is not None:
            return self.source_field, self.target_field
        if self.trained is not None and self.trained.spans is None:
            return self.trained.text_fields
        return (self.text_field,)


@dataclass(slots=True)
class ReadCounts:
    """What reading met, filled while documents are read."""

    files: int = 0
    documents: int = 0
    empty: int = 0
    invalid: int = 0
    repaired: int = 0
    other_members: int = 0  # of tars: neither text nor json
    invalid_examples: list[str] = field(default_factory=list)
    fields_seen: set[str] = field(default_factory=set)  # of id_field and keep_fields

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"fields_seen": sorted(self.fields_seen)}

    def add(self, values: Mapping[str, Any]) -> None:
        """Adds the counts of another reader, as `to_json` gives them."""
        for name in ("files", "documents", "empty", "invalid", "repaired", "other_members"):
            setattr(self, name, getattr(self, name) + values[name])
        self.invalid_examples = (self.invalid_examples + values["invalid_examples"])[:5]
        self.fields_seen |= set(values["fields_seen"])


class DocumentMaker:
    """The shared rules, for one file."""

    def __init__(self, origin: str, spec: SourceSpec, counts: ReadCounts) -> None:
        # A file name is bytes; records of where a document came from are text, `\xff` spelt out.
        self.origin = os.fsencode(origin).decode("utf-8", "backslashreplace")
        self.spec, self.counts = spec, counts
        self._text_fields, self._keep_fields, self._id_field = spec.text_fields, spec.keep_fields, spec.id_field

    def decode(self, data: bytes, where: str, offset: int | None = None) -> str | None:
        """UTF-8 -> text; None if it is not UTF-8 and the spec says to skip.

        Args:
            where: names file and place.
            offset: of the data in the file; named instead of the place alone.

        Raises:
            DataError: not UTF-8.
        """
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            if offset is not None:
                where = f"{where} at byte {offset + error.start}"
            if not self.spec.skip_invalid:
                raise DataError(
                    f"{where} is not UTF-8 (0x{data[error.start]:02x}). Text is read as UTF-8. "
                    "Convert the file, or skip such files with --invalid-utf8 skip."
                ) from None
        self.counts.invalid += 1
        if len(self.counts.invalid_examples) < 5:
            self.counts.invalid_examples.append(where)
        return None

    def text_of(self, record: Mapping[str, Any], name: str, where: str) -> str:
        """A field that must be text. Raises DataError if it is missing or something else."""
        value = record.get(name)
        if isinstance(value, str):
            return self.repair(value)
        if name not in record:
            have = ", ".join(sorted(record)) or "none"
            raise DataError(
                f"{where} has no field {name!r} (it has: {have}). "
                "Name the right one with --text-field, or --source-field and --target-field for pairs."
            )
        raise DataError(f"{where}: field {name!r} is {type(value).__name__}, not text. Correct the line.")

    def from_record(self, record: Mapping[str, Any], where: str, line: int, own_id: str | None = None) -> Document:
        """The document of a record with text fields. Raises DataError as `text_of`."""
        if self.spec.trained is not None:
            text = None if self.spec.trained.spans is None else self.text_of(record, self.spec.text_field, where)
            return self.marked_document(text, record, where, line, own_id)
        text, *rest = [self.text_of(record, name, where) for name in self._text_fields]
        return self.document(text, rest[0] if rest else None, line, record, own_id)

    def marked_document(
        self, text: str | None, record: Mapping[str, Any], where: str, line: int, own_id: str | None = None
    ) -> Document:
        """The document of a record that says which parts are trained. Raises DataError as `TrainedParts.parts`."""
        assert self.spec.trained is not None
        parts = self.spec.trained.parts(record, text, self.text_of, where)
        whole = "".join(part for part, _ in parts)
        return self.document(whole, None, line, record, own_id)._replace(trained=pack_lengths(parts))

    def document(
        self, text: str, target: str | None, line: int, record: Mapping[str, Any], own_id: str | None = None
    ) -> Document:
        """A document with the id and the kept fields of its record; `own_id` names it where the record does not."""
        value = record.get(self._id_field)
        if value is not None and isinstance(value, str | int) and value != "":
            self.counts.fields_seen.add(self._id_field)
            own_id = str(value)
        kept = None
        if self._keep_fields:
            kept = {name: record[name] for name in self._keep_fields if name in record}
            self.counts.fields_seen.update(kept)
        name = self.repair(own_id) if own_id is not None else document_id(self.origin, line)
        return Document(name, text, target, self.origin, line, kept or None)

    def repair(self, text: str) -> str:
        """JSON may hold lone surrogates (`"\\ud800"`), which no UTF-8 can: they become U+FFFD, counted."""
        if text.isascii():
            return text
        try:
            text.encode()
        except UnicodeEncodeError:
            self.counts.repaired += 1
            return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return text


def check_fields_seen(spec: SourceSpec, counts: ReadCounts) -> None:
    """Raises DataError for a field that was asked for and that no document has: a misspelling, most likely."""
    asked = dict.fromkeys(spec.keep_fields, "--keep")
    if spec.id_field != DEFAULT_ID_FIELD:
        asked[spec.id_field] = "--id-field"
    for name, flag in asked.items():
        if counts.documents and name not in counts.fields_seen:
            raise DataError(
                f"no document has a field {name!r}. A field that is asked for must occur. Correct {flag} {name}."
            )
