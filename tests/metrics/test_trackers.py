"""Every tracker by the same rules: it never fails or blocks a run, and loses nothing that its own side could take."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pretrain.log import Log
from pretrain.metrics import JsonlSink, open_sinks, read_attempts
from pretrain.metrics.prometheus_sink import PrometheusSink
from pretrain.metrics.queued import Numbered, QueuedSink
from pretrain.metrics.sinks import _TRACKERS
from pretrain.topology import World
from tests.metrics.home import Home, run_config

WANTED: dict[str, dict[str, Any]] = {
    "tensorboard": {"tensorboard": True},
    "trackio": {"trackio": {"project": "tests"}},
    "prometheus": {"prometheus": {"port": 0}},
}


def _record(step: int, **more: Any) -> dict[str, Any]:
    return {"t": 1e9 + step, "step": step, "loss": 1 / step, "ranks": {"own_s": [0.5, 0.7]}, **more}


def _train(home: Home, attempt: int, steps: range, **wanted: Any) -> None:
    """An attempt that writes to every sink; the steps of a second one overlap with those of the first: a rollback."""
    sinks = open_sinks(run_config(**wanted), home, World(), attempt)
    assert len(sinks) == 2
    for step in steps:
        for sink in sinks:
            sink.write(_record(step, sources={"prose": {"loss": 2.0 / step}}))
    for sink in sinks:
        sink.close()


def test_tensorboard_holds_every_point_of_both_attempts(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    home = Home(tmp_path)
    for attempt, steps in ((1, range(1, 9)), (2, range(6, 11))):
        _train(home, attempt, steps, **WANTED["tensorboard"])
        found = EventAccumulator(str(tmp_path / "tensorboard" / f"attempt-{attempt:03d}"))
        found.Reload()
        points = [(event.step, pytest.approx(event.value, rel=1e-6)) for event in found.Scalars("loss")]
        assert points == [(step, 1 / step) for step in steps]
        assert [event.step for event in found.Scalars("sources/prose/loss")] == list(steps)


def test_trackio_makes_one_run_of_all_attempts_without_a_lost_point(tmp_path: Path) -> None:
    """In processes of their own: trackio reads its folder's name when it is imported, and leaves threads."""
    program = (
        "import sys\n"
        "from tests.metrics.home import Home\n"
        "from tests.metrics.test_trackers import WANTED, _train\n"
        "home = Home(sys.argv[1], name='one-run')\n"
        "_train(home, int(sys.argv[2]), range(int(sys.argv[3]), int(sys.argv[4])), **WANTED['trackio'])\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "rows = SQLiteStorage.get_logs('tests', 'one-run')\n"
        "print(SQLiteStorage.get_runs('tests'), [(row['step'], row['attempt']) for row in rows])\n"
    )
    import os

    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    shown = ""
    for attempt, first, end in ((1, 1, 9), (2, 6, 11)):
        words = [sys.executable, "-c", program, str(tmp_path), str(attempt), str(first), str(end)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        shown = done.stdout.splitlines()[-1]
    points = [(count, 1) for count in range(8)] + [(count, 2) for count in range(8, 13)]
    assert shown == f"{['one-run']} {points}"


def test_rank_zeros_own_exporter_serves_the_last_record_and_the_last_of_each_table(tmp_path: Path) -> None:
    home = Home(tmp_path)
    _, sink = open_sinks(run_config(**WANTED["prometheus"]), home, World(), 3)
    assert isinstance(sink, PrometheusSink)
    sink.write(_record(1, layers={"layers.0": {"update_norm": 0.25}}))
    sink.write({"t": 1.0, "step": 1, "validation": {"prose": {"loss": 3.0}}})
    sink.write(_record(2))
    assert sink.address is not None
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.address[1]}/metrics", timeout=10) as answer:
        lines = set(answer.read().decode().splitlines())
    sink.close()
    labels = 'run="run",attempt="3"'
    assert {
        f"pretrain_step{{{labels}}} 2.0",
        f"pretrain_loss{{{labels}}} 0.5",
        f'pretrain_rank_own_seconds{{{labels},rank="1"}} 0.7',
        f'pretrain_layer_update_norm{{{labels},layer="layers.0"}} 0.25',
        f'pretrain_validation_loss{{{labels},source="prose"}} 3.0',
    } <= lines
    second = PrometheusSink(("203.0.113.1", 9), {}, Log())  # no address of this machine: one warning
    second.write(_record(1))
    second.close()


def test_clients_that_never_finish_their_request_cost_rank_zeros_exporter_nothing() -> None:
    sink = PrometheusSink(("127.0.0.1", 0), {}, Log())
    assert sink.address is not None
    clients = [socket.create_connection(sink.address, timeout=5) for _ in range(40)]
    for client in clients[::2]:
        client.sendall(b"GET /metrics HT")
    for step in range(1, 201):
        sink.write(_record(step))
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.address[1]}/metrics", timeout=10) as answer:
        assert "pretrain_step{} 200.0" in answer.read().decode().replace("pretrain_step ", "pretrain_step{} ")
    sink.close()  # returns, though none of them has let go
    for client in clients:
        client.close()


def _dead(records: Iterator[Numbered]) -> None:
    raise ConnectionRefusedError("nobody listens")


def _slow(records: Iterator[Numbered]) -> None:
    threading.Event().wait()


@pytest.mark.parametrize("tracker", [_dead, _slow])
def test_a_dead_slow_or_full_tracker_costs_warnings_and_no_record_of_the_run(
    tracker: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counted, not timed: every record is on disk although the tracker took none and its queue holds ten."""
    home = Home(tmp_path)
    disk = JsonlSink(home.store, home.metrics_key(1))
    sink = QueuedSink("tracker", tracker, log=Log(), capacity=10)
    if tracker is _dead:
        sink._thread.join(10)
    for step in range(1, 101):
        for each in (disk, sink):
            each.write(_record(step))
    assert sink.missed == (100 if tracker is _dead else 90)
    assert len(read_attempts(home.store)[1]) == 100
    sink.close(timeout_s=0.05)
    assert len(read_attempts(home.store)[1]) == 100
    warnings = capsys.readouterr().err
    told = {_dead: ["tracker is off for the rest of this attempt: ConnectionRefusedError: nobody listens"]}
    for words in told.get(tracker, ["tracker does not keep up", "tracker does not end in time"]):
        assert warnings.count(words) == 1


def test_what_a_tracker_takes_is_all_of_it_in_order() -> None:
    taken: list[Numbered] = []
    sink = QueuedSink("tracker", taken.extend, log=Log())
    for step in range(1, 1001):
        sink.write({"step": step})
    assert sink.close()
    assert sink.missed == 0
    assert taken == [(step - 1, {"step": step}) for step in range(1, 1001)]


def test_trackers_are_imported_only_when_they_are_wanted() -> None:
    program = (
        "import sys, pretrain.metrics.sinks as sinks\n"
        "from tests.metrics.home import run_config\n"
        "assert not any(wanted(run_config().metrics) for wanted, _ in sinks._TRACKERS)\n"
        "print(sorted({'tensorboard', 'trackio', 'wandb', 'torch'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
    assert len(_TRACKERS) == 4
