"""The on-disk format of a built source: manifest, shards, index. Everything that both writer and reader must agree on.

Takes a store that holds a source -> gives a checked `Manifest` and, per shard, a `ShardIndex`.

    SOURCE/manifest.json     counts, layout, tokenizer, per shard sizes and hashes, sha256 of itself
    SOURCE/00000.tar         per block: NNNNNNNN.tok.u2 NNNNNNNN.end.u4 [NNNNNNNN.mask.u1] NNNNNNNN.json   (kind tokens)
                             NNNNNNNN.{src.u2,src.end.u4,tgt.u2,tgt.end.u4,json}        (kind pairs)
    (rows of whole documents: kind tokens with `row_tokens`, a row's padding behind its last document)
    SOURCE/00000.tar.idx     int64 table, a row per block: block, real tokens, then offset, length, crc32 per member

Invariants: blocks are numbered from 0 through all shards in order; only the last block of a source
holds padding (kind tokens); readers use the index, never the tar headers, and check every crc32.
Source: own; the tars are plain ustar WebDataset shards.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import orjson

from pretrain.data.shard_entries import ShardEntry, collector_paused, shard_entries
from pretrain.errors import DataError

if TYPE_CHECKING:
    from pretrain.store import Store

FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"
SHARD_SUFFIX = ".tar"
INDEX_SUFFIX = ".idx"
END_DTYPE = "u4"
MAX_U2_VOCABULARY = 65536
MAX_BLOCK_TOKENS = 2**28  # document ends must fit u4 with room; a block is read as one piece

Kind = Literal["tokens", "pairs"]
TokenDtype = Literal["u2", "u4"]


def dtype_for(vocabulary_size: int) -> TokenDtype:
    """The narrowest dtype that holds every id below `vocabulary_size`."""
    return "u2" if vocabulary_size <= MAX_U2_VOCABULARY else "u4"


def shard_name(number: int) -> str:
    return f"{number:05d}{SHARD_SUFFIX}"


def member_suffixes(kind: Kind, dtype: TokenDtype, *, masked: bool = False) -> tuple[str, ...]:
    """Names of a block's tar members after `NNNNNNNN.`, in the order of tar and index; JSON last."""
    if kind == "tokens":
        return (f"tok.{dtype}", f"end.{END_DTYPE}", *(("mask.u1",) if masked else ()), "json")
    return (f"src.{dtype}", f"src.end.{END_DTYPE}", f"tgt.{dtype}", f"tgt.end.{END_DTYPE}", "json")


def canonical_json(value: Any) -> bytes:
    """One spelling per value, so that hashes are comparable."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


# ------------------------------------------------------------------------------------------ manifest


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a source is. Immutable: other data is another manifest with another `sha256`.

    Attributes:
        block_tokens: tokens of a block (kind tokens), else 0.
        row_tokens: slots of a row of whole documents (kind tokens), 0 where documents are cut at block ends.
        masked: blocks say which tokens are targets (kind tokens): uint8, as many as ids; left out of the JSON if False.
        rows_per_block, source_capacity, target_capacity: layout of a block (kind pairs), else 0.
        tokens: real tokens, end-of-document ids included, padding not; target tokens for pairs.
        source_tokens: real source tokens (pairs), else 0.
        text_bytes: UTF-8 bytes of the documents' text, both sides for pairs.
        fill_fraction: real tokens over slots, both sides for pairs.
        dropped, shortened: documents that no row could hold and that were left out, or cut to fit.
        options: the build options that shaped the content.
        sha256: of the canonical JSON of all other fields; identifies the data in checkpoints.
    """

    name: str
    kind: Kind
    tokenizer_sha256: str
    vocabulary_size: int
    dtype: TokenDtype
    eos_id: int
    pad_id: int
    start_id: int
    block_tokens: int = 0
    row_tokens: int = 0
    masked: bool = False
    rows_per_block: int = 0
    source_capacity: int = 0
    target_capacity: int = 0
    blocks: int = 0
    documents: int = 0
    tokens: int = 0
    source_tokens: int = 0
    text_bytes: int = 0
    fill_fraction: float = 0.0
    dropped: int = 0
    shortened: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    shards: tuple[ShardEntry, ...] = ()
    format_version: int = FORMAT_VERSION
    sha256: str = ""

    @property
    def packed(self) -> bool:
        """Whether rows hold whole documents."""
        return self.kind == "pairs" or self.row_tokens > 0

    @property
    def block_slots(self) -> int:
        """Token slots of a block, both sides for pairs."""
        return self.block_tokens + self.rows_per_block * (self.source_capacity + self.target_capacity)

    @property
    def members(self) -> tuple[str, ...]:
        """Suffixes of a block's members, in index order."""
        return member_suffixes(self.kind, self.dtype, masked=self.masked)

    def rows_per_block_at(self, sequence_length: int) -> int:
        """B, the rows that a block gives at this (target) sequence length.

        Raises:
            DataError: the length does not divide the block, or is not a pair source's target capacity.
        """
        if self.kind == "pairs":
            if sequence_length != self.target_capacity:
                raise DataError(
                    f"sequence_length={sequence_length} does not fit source {self.name}. The writer packed its pairs "
                    f"for {self.target_capacity} target tokens. Set batch.sequence_length={self.target_capacity} and "
                    f"batch.source_length={self.source_capacity}, or change them with `pretrain data repack`."
                )
            return self.rows_per_block
        if self.row_tokens and sequence_length != self.row_tokens:
            raise DataError(
                f"sequence_length={sequence_length} does not fit source {self.name}. Its rows hold whole documents in "
                f"{self.row_tokens} tokens. Set batch.sequence_length={self.row_tokens}, or change the source with "
                "`pretrain data repack --row-tokens`."
            )
        if sequence_length < 1 or self.block_tokens % sequence_length:
            raise DataError(
                f"sequence_length={sequence_length} does not divide the block of source {self.name}. A block of "
                f"{self.block_tokens} tokens is cut into whole rows. Choose a divisor, or change the block with "
                "`pretrain data repack --block-tokens`."
            )
        return self.block_tokens // sequence_length

    def locate(self, block: int) -> tuple[int, int]:
        """Block number -> (shard number, row of that shard's index). Raises IndexError outside 0..blocks-1."""
        if block < 0:
            raise IndexError(block)
        first = 0
        for number, shard in enumerate(self.shards):
            if block < first + shard.blocks:
                return number, block - first
            first += shard.blocks
        raise IndexError(block)

    def body(self) -> dict[str, Any]:
        """All fields but `sha256`, as JSON has them."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "sha256"}
        if not self.masked:
            del values["masked"]
        return values | {"options": dict(self.options), "shards": [shard._asdict() for shard in self.shards]}

    def computed_sha256(self) -> str:
        return hashlib.sha256(canonical_json(self.body())).hexdigest()

    def to_json(self) -> bytes:
        """The bytes of manifest.json, readable, with a fresh `sha256`."""
        text = json.dumps(self.body() | {"sha256": self.computed_sha256()}, indent=1, ensure_ascii=False)
        return text.encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Manifest:
        """Parses and checks manifest.json; `where` names it in messages.

        Raises:
            DataError: not JSON, a missing or unknown field, a wrong sha256, another format version.
        """
        remedy = "Copy the source again or rebuild it with `pretrain data build`."
        try:
            values = orjson.loads(data)
        except ValueError as error:
            raise DataError(f"{where} is damaged: not JSON ({error}). {remedy}") from None
        if not isinstance(values, dict):
            raise DataError(f"{where} is damaged: not a JSON object. {remedy}")
        stored = values.pop("sha256", None)
        quick = orjson.dumps(values, option=orjson.OPT_SORT_KEYS)  # the canonical spelling but for a few floats
        if all(
            hashlib.sha256(text()).hexdigest() != stored for text in (lambda: quick, lambda: canonical_json(values))
        ):
            raise DataError(f"{where} is damaged: its content does not match its own sha256. {remedy}")
        version = values.get("format_version")
        if version != FORMAT_VERSION:
            raise DataError(
                f"{where}: format_version={version} is unknown. This program reads {FORMAT_VERSION}. "
                "Use the version of pretrain that built the source, or rebuild it."
            )
        names = {item.name for item in fields(cls)} - {"sha256"}
        values.setdefault("masked", False)
        if values.keys() != names:
            odd = ", ".join(sorted(values.keys() ^ names))
            raise DataError(f"{where} is damaged: fields missing or unknown: {odd}. {remedy}")
        shards = shard_entries(values["shards"])
        if shards is None:
            wanted = ", ".join(ShardEntry._fields)
            raise DataError(f"{where} is damaged: a shard entry is not whole ({wanted}, of their types). {remedy}")
        manifest = cls(**values | {"shards": shards}, sha256=stored)
        if manifest.blocks < 1 or manifest.blocks != sum(shard.blocks for shard in shards):
            raise DataError(f"{where} is damaged: blocks={manifest.blocks} is not what its shards sum to. {remedy}")
        return manifest


def read_manifest(store: Store) -> Manifest:
    """Reads and checks the manifest of the source in `store`.

    Raises:
        DataError: there is none, or it is damaged or of another version.
    """
    from pretrain.store import NotFoundError

    try:
        data = store.get(MANIFEST_NAME)
    except NotFoundError:
        raise DataError(
            f"{store.url} holds no {MANIFEST_NAME}, so it is not a built source. Build one with "
            f"`pretrain data build INPUT --out {store.url} --tokenizer tokenizer.json`, or correct the path "
            "(a build with a validation split has train/ and validation/ below its --out)."
        ) from None
    where = f"{store.url}/{MANIFEST_NAME}"
    with collector_paused():
        try:
            return Manifest.from_json(data, where)
        except DataError:  # it may only have come damaged, as a block may
            again = store.get(MANIFEST_NAME)
            if again == data:
                raise
            return Manifest.from_json(again, where)


# --------------------------------------------------------------------------------------------- index


class MemberSpan(NamedTuple):
    """Where one member's payload lies in the tar, and its checksum."""

    offset: int
    length: int
    crc32: int


class ShardIndex:
    """The `.idx` of one shard: an int64 table [blocks, 2 + 3 * members], little endian."""

    def __init__(self, table: np.ndarray, members: tuple[str, ...]) -> None:
        self.table = table
        self.members = members

    def __len__(self) -> int:
        return int(self.table.shape[0])

    def block_number(self, row: int) -> int:
        return int(self.table[row, 0])

    def real_tokens(self, row: int) -> int:
        """Tokens before the padding document (kind tokens); target tokens (kind pairs)."""
        return int(self.table[row, 1])

    def span(self, row: int, member: int) -> MemberSpan:
        """The span of member number `member` (order of `Manifest.members`) of the row's block."""
        return MemberSpan(*(int(value) for value in self.table[row, 2 + 3 * member : 5 + 3 * member]))

    def data_spans(self, row: int) -> list[MemberSpan]:
        """The spans of all members of the row's block but the last, which is its provenance."""
        values = self.table[row].tolist()
        return [MemberSpan(*values[at : at + 3]) for at in range(2, len(values) - 3, 3)]

    def to_bytes(self) -> bytes:
        return self.table.astype("<i8").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes, manifest: Manifest, shard: int, where: str) -> ShardIndex:
        """Checks an index file against the manifest; `where` names it in messages.

        Raises:
            DataError: the sha256, the size, the block numbers or a span do not fit the manifest.
        """
        entry = manifest.shards[shard]
        remedy = "Copy the source again or rebuild it with `pretrain data build`."
        if hashlib.sha256(data).hexdigest() != entry.index_sha256:
            raise DataError(f"{where} is damaged: its sha256 is not the manifest's. {remedy}")
        columns = 2 + 3 * len(manifest.members)
        if len(data) != entry.blocks * columns * 8:
            raise DataError(f"{where} holds {len(data)} bytes, not {entry.blocks} blocks of {columns * 8}. {remedy}")
        table = np.frombuffer(data, dtype="<i8").reshape(entry.blocks, columns)
        first = sum(before.blocks for before in manifest.shards[:shard])
        ends = table[:, 2::3] + table[:, 3::3]
        if (
            not np.array_equal(table[:, 0], np.arange(first, first + entry.blocks))
            or int(table.min()) < 0
            or int(ends.max()) > entry.bytes
        ):
            raise DataError(f"{where} does not describe shard {entry.name} of this manifest. {remedy}")
        return cls(table, manifest.members)


# ---------------------------------------------------------------------------------------- provenance


class Provenance(NamedTuple):
    """Where a document came from: its id, the file, the line, row or sample (0 for whole files), and the fields
    that the build was told to keep."""

    id: str
    origin: str
    line: int
    metadata: dict[str, Any] | None = None


def document_id(origin: str, line: int) -> str:
    """The id of a document that brings none of its own."""
    return f"{origin}:{line}" if line else origin


def provenance_rest(item: Provenance) -> bytes:
    """A document's own part of the JSON member: its line, then id and kept fields where it has such."""
    own_id = None if item.id == document_id(item.origin, item.line) else item.id
    if own_id is None and item.metadata is None:
        return b"%d" % item.line
    values = [item.line] + ([own_id, item.metadata] if item.metadata is not None else [own_id])
    return canonical_json(values)[1:-1]


def join_provenance(
    origins: Sequence[str],
    rests: Sequence[bytes],
    *,
    continued: bool = False,
    text_bytes: Sequence[int] | None = None,
    numbers: Sequence[int | list[int]] | None = None,
) -> bytes:
    """The JSON member of a block: its documents in order, each origin once.

    Args:
        origins, rests: per document; `rests` as `provenance_rest` gives them.
        continued: the first document began in an earlier block.
        text_bytes: UTF-8 bytes of each document's text; sources built here have them.
        numbers: place of each document in the corpus (rows of whole documents); [number, piece] for a piece that is
            not the last one of a document that no row could hold.
    """
    seen: dict[str, int] = {}
    rows = [
        b"[%d,%b]" % (seen.setdefault(origin, len(seen)), rest) for origin, rest in zip(origins, rests, strict=True)
    ]
    return b"".join(
        (
            b'{"continued":%b,"documents":[' % (b"true" if continued else b"false"),
            b",".join(rows),
            b'],"numbers":' + canonical_json(numbers) if numbers is not None else b"]",
            b',"origins":' + canonical_json(list(seen)),
            b',"text_bytes":' + canonical_json(text_bytes) if text_bytes is not None else b"",
            b"}",
        )
    )


def encode_provenance(documents: list[Provenance], *, continued: bool = False) -> bytes:
    """`join_provenance` of documents of which only the provenance is known."""
    origins, rests = [item.origin for item in documents], [provenance_rest(item) for item in documents]
    return join_provenance(origins, rests, continued=continued)


def decode_provenance(data: bytes) -> tuple[list[Provenance], bool]:
    """The inverse of `encode_provenance`: (documents, continued).

    For pairs the documents follow the rows: as many per row as there are ends in that row.
    """
    body = json.loads(data)
    origins = body["origins"]
    documents = []
    for origin_number, line, *rest in body["documents"]:
        origin = origins[origin_number]
        own_id, metadata = (*rest, None, None)[:2]
        name = document_id(origin, line) if own_id is None else own_id
        documents.append(Provenance(name, origin, line, metadata))
    return documents, bool(body["continued"])
