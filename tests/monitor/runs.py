"""Run directories with hand-made journals and records, as a run would have written them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pretrain.rundir import Event, ProcessIdentity, RunDirectory
from pretrain.rundir.records import encode_record
from tests.rundir.helpers import gone_process, new_run, put_lease


def write_run(
    home: Path,
    name: str,
    events: Iterable[Event],
    records: Mapping[int, Iterable[dict[str, Any]]],
    holder: ProcessIdentity | None = None,
) -> RunDirectory:
    """A run; its lease is held by `holder`, or was released by a process that is gone."""
    run = new_run(home, name)
    add_events(run, events)
    for attempt, rows in records.items():
        run.store.put(run.metrics_key(attempt), b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    put_lease(run.store, holder or gone_process(), 1025.0, released=holder is None)
    return run


def add_events(run: RunDirectory, events: Iterable[Event]) -> None:
    last: dict[str, int] = {}
    for event in events:
        seen = {lease: seq for lease, seq in last.items() if int(lease) < event.lease}
        body = {"kind": event.kind, "t": event.t, "lease": event.lease, "seq": event.seq}
        data = encode_record({**body, "fields": event.fields, "seen": seen})
        run.store.put(f"journal/{event.lease:06d}/{event.seq:08d}.json", data)
        last[str(event.lease)] = event.seq
