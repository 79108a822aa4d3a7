"""The wandb sink, read back from the offline files that wandb itself wrote."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from benchmarks.machine import memory_kib
from pretrain.log import Log
from pretrain.metrics import JsonlSink, open_sinks
from pretrain.metrics.queued import QUEUE_RECORDS, flatten
from pretrain.metrics.wandb_artifacts import send_export
from pretrain.metrics.wandb_run import obtain_id
from pretrain.metrics.wandb_sink import WandbSink
from pretrain.store import open_store
from pretrain.topology import World
from tests.metrics.home import Home, run_config
from tests.metrics.wandb_files import offline_files, read_artifacts, read_history, read_system


def test_two_attempts_make_one_wandb_run_whose_x_axis_is_the_step_and_no_point_is_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, home = run_config("offline"), Home(tmp_path)
    for attempt, steps in ((1, range(1, 9)), (2, range(6, 11))):
        sinks = open_sinks(config, home, World(), attempt)
        assert [type(sink) for sink in sinks] == [JsonlSink, WandbSink]
        for step in steps:
            for sink in sinks:
                sink.write({"step": step, "loss": 1.0 / step, "mfu": None, "applied": True})
        for sink in sinks:
            sink.close()
        time.sleep(1.1 if attempt == 1 else 0)  # wandb names its directories by the second
    assert capsys.readouterr() == ("", "")
    files = offline_files(tmp_path)
    assert len(files) == 2  # one per attempt, whatever the number of ranks
    first, second = (read_history(file) for file in files)
    assert first[0] == second[0] == obtain_id(home.store)
    assert [row["step"] for row in first[1]] == list(range(1, 9))
    # The newest directory holds the whole run; steps that were repeated are there twice, marked.
    assert [row["step"] for row in second[1]] == [*range(1, 9), *range(6, 11)]
    assert [row["attempt"] for row in second[1]] == [1] * 8 + [2] * 5
    assert [row["_step"] for row in second[1]] == list(range(13))  # wandb's own count rises: nothing is dropped
    assert first[2]["*"] == second[2]["*"] == "step"
    assert first[1][3]["loss"] == pytest.approx(0.25)
    assert "mfu" not in first[1][0]


def test_points_that_a_sigkill_took_from_wandb_are_sent_by_the_next_attempt(tmp_path: Path) -> None:
    home = Home(tmp_path)
    killed = JsonlSink(home.store, home.metrics_key(1))  # all that is left of an attempt that was killed
    for step in range(1, 6):
        killed.write({"step": step, "loss": float(step)})
    sink = WandbSink(run_config("offline"), home, 2)
    sink.write({"step": 5, "loss": 5.0})
    sink.close()
    (file,) = offline_files(tmp_path)
    assert [(row["_step"], row["step"], row["attempt"]) for row in read_history(file)[1]] == [
        *((step - 1, step, 1) for step in range(1, 6)),
        (5, 5, 2),
    ]


def test_the_machine_is_measured_beside_the_run_by_wandb_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_X_STATS_SAMPLING_INTERVAL", "0.5")  # 15 s by default
    sink = WandbSink(run_config("offline"), Home(tmp_path), 1)
    sink.write({"step": 1, "loss": 1.0})
    deadline = time.monotonic() + 60
    while not offline_files(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(5.0)  # ten samples on idle cores
    sink.close()
    (file,) = offline_files(tmp_path)
    assert [row["loss"] for row in read_history(file)[1]] == [1.0]
    samples = read_system(file)
    assert len(samples) >= 2
    disk = shutil.disk_usage("/")
    assert samples[-1]["proc.memory.rssMB"] == pytest.approx(memory_kib("VmRSS") / 1024, rel=0.2)
    assert samples[-1]["disk./.usageGB"] == pytest.approx(disk.used / 2**30, rel=0.2)


def _home_with_files(root: Path) -> Home:
    home = Home(root)
    home.store.put("run.yaml", b"name: a-run\n")
    home.store.put("tokenizer.json", b"{}")
    _publish(home, "step-00000005-a001", 5)
    return home


def _publish(home: Home, name: str, step: int) -> None:
    body = {"step": step, "files": [{"name": "rank-00000.safetensors", "bytes": 70}, {"name": "rank-1", "bytes": 30}]}
    home.checkpoints.put(f"{name}/MANIFEST.json", json.dumps({"body": body, "sha256": ""}).encode())


def test_chosen_artifacts_are_in_the_file_with_their_bytes_and_outlive_a_pruned_checkpoint(tmp_path: Path) -> None:
    home = _home_with_files(tmp_path)
    config = run_config({"mode": "offline", "artifacts": ["config", "tokenizer", "checkpoints"]})
    sink = WandbSink(config, home, 2)
    sink.write({"step": 6, "loss": 1.0})
    _publish(home, "step-00000010-a002", 10)
    home.checkpoints.put("step-00000011-a002/rank-00000.safetensors", b"not published")
    sink.close()
    for name in ("step-00000005-a001", "step-00000010-a002"):
        home.checkpoints.delete_tree(name)  # as retention does; a sync comes later
    (file,) = offline_files(tmp_path)
    assert [row["step"] for row in read_history(file)[1]] == [6]
    found = read_artifacts(file)
    assert [(name, kind) for name, kind, *_ in found] == [
        ("a-run-config", "config"),
        ("a-run-tokenizer", "tokenizer"),
        ("a-run-checkpoint", "checkpoint"),
        ("a-run-checkpoint", "checkpoint"),
    ]
    assert found[0][4]["run.yaml"].read_bytes() == b"name: a-run\n"
    assert found[1][4]["tokenizer.json"].read_bytes() == b"{}"
    for (*_, told, aliases, files), name, step in zip(
        found[2:], ("step-00000005-a001", "step-00000010-a002"), (5, 10), strict=True
    ):
        url = f"{home.checkpoints.url}/{name}"
        assert told == {"run": "a-run", "checkpoint": name, "step": step, "bytes": 100, "url": url}
        assert sorted(aliases) == ["latest", name]
        assert json.loads(files["MANIFEST.json"].read_bytes())["body"]["step"] == step


def test_artifacts_are_off_until_they_are_chosen_and_one_that_fails_costs_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = WandbSink(run_config("offline"), _home_with_files(tmp_path / "one"), 1)
    sink.close()
    assert read_artifacts(offline_files(tmp_path / "one")[0]) == []
    home = _home_with_files(tmp_path / "two")
    home.store.delete("tokenizer.json")
    config = run_config({"mode": "offline", "artifacts": ["tokenizer", "config"]})
    sink = WandbSink(config, home, 1)
    sink.write({"step": 1})
    sink.close()
    (file,) = offline_files(tmp_path / "two")
    assert [name for name, *_ in read_artifacts(file)] == ["a-run-config"]
    assert [row["step"] for row in read_history(file)[1]] == [1]
    warnings = capsys.readouterr().err
    assert warnings.count("WARNING") == warnings.count("wandb gets no more artifacts of tokenizer in this attempt") == 1


def test_an_export_becomes_an_artifact_of_the_same_wandb_run(tmp_path: Path) -> None:
    home = Home(tmp_path / "run")
    model = tmp_path / "exported"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    send_export(run_config("offline"), home, model, Log(), checkpoint="step-00000010-a001")
    (file,) = offline_files(tmp_path / "run")
    assert read_history(file)[0] == obtain_id(home.store)
    ((name, kind, told, _, files),) = read_artifacts(file)
    assert (name, kind) == ("a-run-model", "model")
    assert told == {"run": "a-run", "checkpoint": "step-00000010-a001"}
    assert sorted(files) == ["config.json", "model.safetensors"]


def test_a_dead_server_costs_one_warning_and_the_records_are_kept_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    home = Home(tmp_path)
    sink = WandbSink(run_config("online"), home, 1, init_timeout_s=1.0)
    for step in range(1, 6):
        sink.write({"step": step, "loss": 1.0})
    assert sink._sink.missed == 0
    sink.close()
    warnings = capsys.readouterr().err
    assert warnings.count("WARNING") == warnings.count("wandb is offline for this attempt: CommError") == 1
    (file,) = offline_files(tmp_path)
    assert [row["step"] for row in read_history(file)[1]] == [1, 2, 3, 4, 5]


def test_without_an_api_key_nobody_is_asked_and_the_records_are_kept_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    monkeypatch.setenv("NETRC", str(tmp_path / "nothing"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    sink = WandbSink(run_config("online"), Home(tmp_path), 1)
    sink.write({"step": 1})
    sink.close()
    warnings = capsys.readouterr().err
    assert warnings.count("WARNING") == warnings.count("offline for this attempt: UserError: no API key") == 1
    (file,) = offline_files(tmp_path)
    assert [row["step"] for row in read_history(file)[1]] == [1]


def test_a_directory_that_wandb_cannot_use_ends_in_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics/wandb.json").write_text("not json")
    sink = WandbSink(run_config("offline"), Home(tmp_path), 1)
    sink.write({"step": 1})
    sink.close()
    sink.write({"step": 2})
    assert capsys.readouterr().err.count("WARNING wandb is off for the rest of this attempt") == 1
    assert offline_files(tmp_path) == []


def test_a_tracker_that_hangs_blocks_neither_write_nor_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(WandbSink, "_start", lambda self: threading.Event().wait())
    sink = WandbSink(run_config("offline"), Home(tmp_path), 1)
    for step in range(QUEUE_RECORDS + 10):
        sink.write({"step": step})
    sink.close(timeout_s=0.2)  # returns, though the tracker never does
    assert sink._sink.missed == 10
    warnings = capsys.readouterr().err
    assert warnings.count("misses records") == 1
    assert "does not end in time" in warnings


def test_the_id_is_drawn_once_per_run_directory(tmp_path: Path) -> None:
    one, other = open_store(tmp_path / "one"), open_store(tmp_path / "other")
    assert obtain_id(one) == obtain_id(one)
    assert obtain_id(one) != obtain_id(other)


def test_an_object_store_keeps_the_id_too(tmp_path: Path) -> None:
    store = Home(f"memory://{tmp_path.name}").store
    assert obtain_id(store) == obtain_id(store)


def test_records_become_flat_keys() -> None:
    record = {"step": 4, "applied": False, "mfu": None, "validation": {"prose": {"loss": 2.0, "bits": float("nan")}}}
    assert flatten(record) == {"step": 4, "applied": 0, "validation/prose/loss": 2.0}
