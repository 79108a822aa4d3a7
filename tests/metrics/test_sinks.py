"""The JSON lines sink: on disk per record, complete after crashes and full disks, one writer."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from pretrain.errors import StoreError
from pretrain.metrics import JsonlSink, history, open_sinks, read_attempts
from pretrain.metrics.definitions import STEP_FIELDS, VALIDATION_FIELDS, unknown_fields
from pretrain.metrics.history import decode_records
from pretrain.metrics.sinks import FLUSH_RECORDS, FLUSH_SECONDS
from pretrain.store import open_store
from pretrain.store.local import LocalStore
from pretrain.topology import World
from tests.metrics.home import Home, run_config


def test_a_record_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    sink = JsonlSink(open_store(tmp_path), "metrics/attempt-001.jsonl")
    for step in (1, 2):
        sink.write({"step": step, "loss": 1 / 3})
        lines = (tmp_path / "metrics/attempt-001.jsonl").read_text().splitlines()
        assert json.loads(lines[-1]) == {"step": step, "loss": 1 / 3}
        assert len(lines) == step


def test_every_record_before_a_sigkill_is_kept(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from pretrain.metrics import JsonlSink\n"
        "from pretrain.store import open_store\n"
        "sink = JsonlSink(open_store(sys.argv[1]), 'metrics/attempt-001.jsonl')\n"
        "for step in range(1, 8): sink.write({'step': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60, env=os.environ)
    assert process.returncode == -signal.SIGKILL
    assert [r["step"] for r in read_attempts(open_store(tmp_path))[1]] == [1, 2, 3, 4, 5, 6, 7]


def test_numbers_survive_exactly_and_what_is_not_finite_becomes_null(tmp_path: Path) -> None:
    home = Home(tmp_path)
    sink = JsonlSink(home.store, home.metrics_key(1))
    loss, digest = 0.1 + 0.2, 2**62 - 1
    sink.write({"step": 1, "loss": loss, "data_digest": digest, "gradient_norm": math.inf, "applied": False})
    sink.write({"step": 2, "loss": math.nan, "validation": {"prose": {"loss": -math.inf}}})
    text = (tmp_path / "metrics/attempt-001.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    first, second = read_attempts(home.store)[1]
    assert first == {"step": 1, "loss": loss, "data_digest": digest, "gradient_norm": None, "applied": False}
    assert second == {"step": 2, "loss": None, "validation": {"prose": {"loss": None}}}


class _Full(LocalStore):
    """A store whose disk is full for a while; a failing append leaves half of its bytes."""

    full = False

    def append(self, key: str, data: bytes) -> None:
        super().append(key, data[: len(data) // 2] if self.full else data)
        if self.full:
            raise StoreError("No space left on device")


def test_a_full_disk_costs_one_warning_and_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = _Full(tmp_path)
    sink = JsonlSink(store, "metrics/attempt-001.jsonl")
    sink.write({"step": 1})
    store.full = True
    sink.write({"step": 2})
    sink.write({"step": 3})
    store.full = False
    sink.write({"step": 4})
    sink.close()
    records = read_attempts(store)[1]
    assert {r["step"] for r in records} == {1, 2, 3, 4}
    assert [r["step"] for r in history({1: records})] == [1, 2, 3, 4]
    warnings = capsys.readouterr().err
    assert warnings.count("WARNING") == 1
    assert "No space left" in warnings


def test_records_that_never_reach_the_disk_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = _Full(tmp_path)
    store.full = True
    sink = JsonlSink(store, "metrics/attempt-001.jsonl")
    sink.write({"step": 1})
    sink.write({"step": 2})
    sink.close()
    warnings = capsys.readouterr().err
    assert "metrics lost" in warnings
    assert "records=2" in warnings


def test_an_object_store_gets_numbered_chunks_in_order() -> None:
    home = Home(f"memory://{uuid.uuid4().hex}")
    now = [0.0]
    sink = JsonlSink(home.store, home.metrics_key(2), clock=lambda: now[0])
    for step in range(1, FLUSH_RECORDS + 1):
        sink.write({"step": step})
    assert home.store.list("metrics") == ["metrics/attempt-002/00000000.jsonl"]
    now[0] += FLUSH_SECONDS
    sink.write({"step": FLUSH_RECORDS + 1})
    sink.write({"step": FLUSH_RECORDS + 2})
    sink.close()
    assert len(home.store.list("metrics")) == 3
    assert [r["step"] for r in read_attempts(home.store)[2]] == list(range(1, FLUSH_RECORDS + 3))


def test_only_rank_zero_records(tmp_path: Path) -> None:
    config, home = run_config(), Home(tmp_path)
    assert open_sinks(config, home, World(1, 2, 1, 2), 1) == []
    sinks = open_sinks(config, home, World(0, 2, 0, 2), 1)
    assert [type(sink) for sink in sinks] == [JsonlSink]  # wandb is off by default


def test_a_line_cut_by_a_crash_is_left_out() -> None:
    assert decode_records(b'{"step":1}\n{"step":2,"lo') == [{"step": 1}]
    assert decode_records(b'{"step":1,"lo\n{"step":2}\n17\n{"loss":1}\n') == [{"step": 2}]


def test_a_step_repeated_after_a_restore_counts_once_and_the_later_attempt_wins(tmp_path: Path) -> None:
    home = Home(tmp_path)
    for attempt, steps in ((1, range(1, 9)), (2, range(6, 11))):
        sink = JsonlSink(home.store, home.metrics_key(attempt))
        for step in steps:
            sink.write({"step": step, "loss": float(attempt)})
            if step == 8:
                sink.write({"step": step, "validation": {"prose": {"loss": float(attempt)}}})
    attempts = read_attempts(home.store)
    assert [len(records) for records in attempts.values()] == [9, 6]  # nothing is dropped from the files
    rows = history(attempts)
    assert [r["step"] for r in rows if "loss" in r] == list(range(1, 11))
    assert [r["loss"] for r in rows if "loss" in r] == [1.0] * 5 + [2.0] * 5
    assert [r["validation"]["prose"]["loss"] for r in rows if "validation" in r] == [2.0]


def test_the_ledger_gives_every_field_a_unit_and_a_meaning_and_finds_strangers() -> None:
    for name, metric in (STEP_FIELDS | VALIDATION_FIELDS).items():
        assert metric.name == name
        assert metric.unit
        assert len(metric.meaning) >= len("exp(loss)")
    assert unknown_fields({"step": 1, "loss": 2.0, "lr": 1.0}) == ["lr"]
    assert unknown_fields({"step": 1, "validation": {"a": {"loss": 1.0, "bpb": 1.0}}}) == ["validation.a.bpb"]


def test_the_package_loads_neither_torch_nor_matplotlib_nor_wandb() -> None:
    program = "import sys, pretrain.metrics; print(sorted({'torch', 'matplotlib', 'wandb'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
