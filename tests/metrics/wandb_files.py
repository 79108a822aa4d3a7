"""What wandb's own offline files hold, read without wandb's reader, which it no longer has."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def offline_files(root: Path) -> list[Path]:
    """The files of a run directory's attempts, oldest first."""
    return sorted(root.glob("wandb/offline-run-*/*.wandb"))


def _records(path: Path) -> Iterator[Any]:
    """Records of a .wandb file: 7-byte header, then LevelDB log framing in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, place, partial = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        partial += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(partial)
            partial = b""
            yield record


def read_history(path: Path) -> tuple[str, list[dict[str, Any]], dict[str, str]]:
    """Run id, history rows and the x axis of each defined metric."""
    run_id, rows, axes = "", [], {}
    for record in _records(path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run_id = record.run.run_id
        elif kind == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        elif kind == "metric":
            axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
    return run_id, rows, axes


def read_system(path: Path) -> list[dict[str, Any]]:
    """Samples of the machine that wandb's own service took, oldest first."""
    records = (record for record in _records(path) if record.WhichOneof("record_type") == "stats")
    return [{item.key: json.loads(item.value_json) for item in record.stats.item} for record in records]


def read_artifacts(path: Path) -> list[tuple[str, str, dict[str, Any], list[str], dict[str, Path]]]:
    """(name, type, metadata, aliases, files) of each artifact record; the files are checked against their digests."""
    found = []
    for record in _records(path):
        if record.WhichOneof("record_type") != "artifact":
            continue
        artifact = record.artifact
        files = {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}
        for entry in artifact.manifest.contents:
            digest = hashlib.md5(Path(entry.local_path).read_bytes()).digest()
            assert base64.b64decode(entry.digest) == digest
        found.append((artifact.name, artifact.type, json.loads(artifact.metadata), list(artifact.aliases), files))
    return found
