"""Stage of a build: some input files -> sorted runs of their documents.

Takes file numbers -> gives counts and runs. A pure function of the files and the options; see `tasks`.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from pretrain.data.documents import Document, ReadCounts, SourceSpec
from pretrain.data.format import Provenance, provenance_rest
from pretrain.data.inputs import InputFile
from pretrain.data.selection import Selection, identity, is_validation, order_key
from pretrain.data.sources import read_file
from pretrain.data.spill import RunWriter, Spilled
from pretrain.data.tick import Tick
from pretrain.data.trained_parts import TrainedParts
from pretrain.store import Store

_TICK_DOCUMENTS = 1024


def spec_of(values: dict[str, Any]) -> SourceSpec:
    """A spec from JSON."""
    fields: dict[str, Any] = values | {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    if values.get("trained") is not None:
        marks = values["trained"]
        fields["trained"] = TrainedParts(**(marks | {"roles": tuple(marks["roles"])}))
    return SourceSpec(**fields)


def read_piece(
    store: Store, folder: str, number: int, common: dict[str, Any], item: dict[str, Any], tick: Tick
) -> dict[str, Any]:
    """Reads the files of one piece and writes its runs.

    Args:
        common: spec, seed, deduplicate, validation_fraction, max_bytes, run_bytes.
        item: files: [number, name, bytes, stamp] each.
        tick: hears bytes of text as they are read.

    Raises:
        DataError, StoreError: as `sources.read_documents`.
    """
    spec, counts = spec_of(common["spec"]), ReadCounts()
    selection = Selection(common["max_bytes"])
    runs = RunWriter(store, f"{folder}/{number:06d}", common["run_bytes"], deduplicate=common["deduplicate"])
    read_bytes, kept_bytes, not_selected, told = 0, 0, 0, 0
    for file_number, *described in item["files"]:
        file = InputFile(*described)
        for place, document in enumerate(read_file(file, spec, counts)):
            spilled, num_bytes = _spilled(document, file_number, place, common)
            read_bytes += num_bytes
            if selection.offer(spilled.identity, num_bytes):
                kept_bytes += num_bytes
                runs.add(spilled)
            else:
                not_selected += 1
            if place % _TICK_DOCUMENTS == 0:
                tick(read_bytes - told, 0)
                told = read_bytes
        file.check_unchanged()
    tick(read_bytes - told, 0)
    written = runs.close()
    if common["max_bytes"] is not None:
        identities, sizes = selection.kept()
        store.put(f"{folder}/{number:06d}.kept", identities + np.array(sizes, dtype="<i8").tobytes())
    return {
        "runs": [[run.key, run.bytes] for run in written],
        "counts": counts.to_json(),
        "read_bytes": read_bytes,
        "kept_bytes": kept_bytes,
        "not_selected": not_selected,
        "limit": None if selection.limit is None else selection.limit.hex(),
        "duplicates": runs.duplicates,
        "duplicate_bytes": runs.duplicate_bytes,
    }


def _spilled(document: Document, file: int, place: int, common: dict[str, Any]) -> tuple[Spilled, int]:
    """The document with its digests, and the bytes of its text."""
    text = document.text.encode()
    target = document.trained if document.target is None else document.target.encode()
    key = identity(text, target, None if common["deduplicate"] else (file << 64) + place)
    fraction = common["validation_fraction"]
    metadata = document.metadata
    if metadata is not None:
        metadata = json.loads(json.dumps(metadata, default=str))
    rest = provenance_rest(Provenance(document.id, document.origin, document.line, metadata))
    held_out = fraction > 0 and is_validation(text, fraction)
    spilled = Spilled(order_key(key, common["seed"]), key, file, place, held_out, rest, text, target)
    return spilled, len(text) + (0 if document.target is None else len(target or b""))
