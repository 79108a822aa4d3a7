"""The index beside long records: what it shows is what the records say, and whatever happens to it costs only time."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from launch.monitor import reader as reader_module
from launch.monitor.curves import View, curve
from launch.monitor.reader import RunReader
from pretrain.metrics import JsonlSink
from pretrain.metrics.index import BLOCK_RECORDS, index_key
from pretrain.rundir import RunDirectory
from tests.monitor.journals import Journal, step, validation
from tests.monitor.runs import write_run

RECORDS = 700
SPIKE = 333


def _records() -> list[dict[str, Any]]:
    """700 steps of a second; a save of half a second at each 100, a validation of 2 s at each 250, a spike at 333."""
    rows, t = [], 10.0
    for number in range(1, RECORDS + 1):
        stall = 0.5 if number % 100 == 0 else 0.0
        t += 1.0 + stall
        row = step(t, number, 1.0, stall_s=stall, wait_s=0.25 if number == 400 else 0.125)
        row |= {"loss": 90.0 if number == SPIKE else 2.0 + math.sin(number / 50), "tokens": 10 * number}
        row["sources"] = {"prose": {"share": 0.5 + number / 10_000}}
        row["ranks"] = {"own_s": [0.5, 0.9 if number == 500 else 0.5]}
        if number % 100 == 0:
            row["layers"] = {"layers.0": {"update_norm": number / 100}}
        rows.append(row)
        if number % 250 == 0:
            t += 2.0
            rows.append(validation(t, number, 2.0))
    return rows


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    journal = Journal().at(0, "created").at(0, "attempt_started", attempt=1, ranks=2)
    journal.at(800, "attempt_ended", attempt=1, outcome="completed").at(800, "completed", step=RECORDS)
    run = write_run(tmp_path, "long", journal.events, {})
    sink = JsonlSink(run.store, run.metrics_key(1))
    for row in _records():
        sink.write(row)
    sink.close()
    return run


def _read(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, *, indexed: bool) -> RunReader:
    monkeypatch.setattr(reader_module, "INDEX_FROM_BYTES", 1 if indexed else 1 << 40)
    reader = RunReader(run)
    reader.refresh()
    assert reader.problem is None
    return reader


def test_a_page_reads_the_index_and_shows_extremes_ledger_and_validations_of_the_records(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, short = _read(run, monkeypatch, indexed=False), _read(run, monkeypatch, indexed=True)
    blocks = (RECORDS + 2) // BLOCK_RECORDS
    assert len(run.store.get(index_key(run.metrics_key(1))).splitlines()) == blocks
    assert (whole.columns[1].length, len(short.blocks[1])) == (RECORDS, blocks)
    assert short.columns[1].length == 2 * blocks + (RECORDS + 2) % BLOCK_RECORDS
    shown = curve(short, "loss", View(smooth=200))
    assert max(value for value in shown["kept"][1] if value is not None) == 90.0
    spike_at = shown["kept"][0][shown["kept"][1].index(90.0)]
    assert spike_at is not None
    assert abs(spike_at - SPIKE) <= BLOCK_RECORDS
    assert len(shown["smooth"][0]) == blocks + (RECORDS + 2) % BLOCK_RECORDS
    assert curve(short, "sources.prose.share", View())["kept"][1][-1] == pytest.approx(0.57)
    assert (
        curve(short, "layers.layers.0.update_norm", View())["kept"]
        == curve(whole, "layers.layers.0.update_norm", View())["kept"]
    )
    assert short.ledger().seconds == pytest.approx(whole.ledger().seconds)
    assert short.validations == whole.validations
    assert short.last_record()["step"] == RECORDS
    assert max(max(row) for row in short.ranks[1].own_s) == 0.9


def test_zoomed_in_the_records_themselves_are_read(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, short = _read(run, monkeypatch, indexed=False), _read(run, monkeypatch, indexed=True)
    for view in (View(low=300, high=360), View(x="tokens", low=3000, high=3600), View(low=650, high=700)):
        zoomed, expected = curve(short, "loss", view)["kept"], curve(whole, "loss", view)["kept"]
        pairs = dict(zip(*zoomed, strict=True))
        for x, y in zip(*expected, strict=True):
            if x is not None and view.low <= x <= view.high:
                assert pairs[x] == y


@pytest.mark.parametrize("damage", ["gone", "torn", "stale", "of another file"])
def test_an_index_that_is_gone_torn_or_stale_is_made_again(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    key = index_key(run.metrics_key(1))
    good = run.store.get(key)
    lines = good.splitlines(keepends=True)
    other = json.loads(lines[1]) | {"begin": 17}
    damaged = {
        "gone": b"",
        "torn": good[: len(lines[0]) + len(lines[1]) // 2],
        "stale": lines[0],
        "of another file": lines[0] + json.dumps(other).encode() + b"\n",
    }[damage]
    run.store.put(key, damaged) if damaged else run.store.delete(key)
    expected = _read(run, monkeypatch, indexed=False).ledger().seconds
    assert _read(run, monkeypatch, indexed=True).ledger().seconds == pytest.approx(expected)
    assert run.store.get(key) == good  # kept, for this run has ended


def test_lines_that_a_full_disk_tore_make_the_writer_leave_the_index_to_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal().at(0, "created").at(0, "attempt_started", attempt=1, ranks=2).at(800, "completed", step=9)
    run = write_run(tmp_path, "torn", journal.events, {})
    sink = JsonlSink(run.store, run.metrics_key(1))
    rows = _records()
    for row in rows[:200]:
        sink.write(row)
    run.store.append(run.metrics_key(1), b'{"step": 201, "lo\n')  # as a failing append leaves it
    for row in rows[200:400]:
        sink.write(row)
    reader = _read(run, monkeypatch, indexed=True)
    assert reader.last_record()["step"] == 399
    assert len(reader.blocks[1]) == 400 // BLOCK_RECORDS
    assert len(run.store.get(index_key(run.metrics_key(1))).splitlines()) == 400 // BLOCK_RECORDS
