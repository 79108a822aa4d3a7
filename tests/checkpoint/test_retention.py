"""Which checkpoints stay: the last, every n-th, the best, pinned ones, and those that somebody reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.checkpoint import (
    Best,
    CheckpointInfo,
    Retention,
    list_checkpoints,
    open_verified,
    open_weights,
    pin,
    prune,
    reading,
    save,
    unpin,
)
from pretrain.checkpoint import holds as holds_module
from pretrain.checkpoint.format import checkpoint_name
from pretrain.checkpoint.retention import best_of, disposable
from pretrain.config import load_config
from pretrain.errors import CheckpointError, ConfigError, StoreError
from pretrain.store import Store, open_store
from pretrain.topology import World
from tests.checkpoint.test_format import FakeEngine, command, run, store_one

__all__ = ["run"]
CONFIG = Path(__file__).resolve().parents[2] / "configs" / "tests" / "tiny-decoder.yaml"


def measured(step: int, loss: float, *, pinned: bool = False, attempt: int = 1) -> CheckpointInfo:
    validation = {"text": {"loss": loss, "bits_per_byte": -loss}}
    return CheckpointInfo(checkpoint_name(step, attempt), step, attempt, 1, 1, None, pinned, validation)


def gone(found: list[CheckpointInfo], retention: Retention) -> list[int]:
    return [info.step for info in disposable(found, retention)]


FOUND = [measured(60, 5.0), measured(50, 4.0), measured(40, 2.0), measured(30, 3.0), measured(20, 2.0)]


def test_best_and_last_are_both_kept() -> None:
    # With keep_last=1 and the best in the middle, others lose one of the two.
    assert gone(FOUND, Retention(1, best=Best("text", "loss"))) == [50, 30, 20]
    assert gone(FOUND, Retention(1, best=Best("text", "loss", 2))) == [50, 30]
    assert gone(FOUND, Retention(1, best=Best("text", "bits_per_byte"))) == [50, 40, 30, 20]
    assert gone(FOUND, Retention(1, best=Best("other", "loss"))) == [50, 40, 30, 20]


def test_every_nth_and_pinned_ones_stay() -> None:
    assert gone(FOUND, Retention(2, keep_every_steps=20)) == [30]
    pinned = [*FOUND[:3], measured(30, 3.0, pinned=True), FOUND[4]]
    assert gone(pinned, Retention(1)) == [50, 40, 20]


def test_a_metric_that_is_no_number_is_never_the_best() -> None:
    found = [measured(3, 1.0), measured(2, float("nan")), measured(1, 0.5)]
    assert [info.step for info in best_of(found, Best("text", "loss", 3))] == [1, 3]
    assert best_of(found, None) == []


def test_the_metric_is_kept_with_the_checkpoint(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    origin = {"validation": {"text": {"loss": 1.5, "bits_per_byte": float("inf")}}}
    save(
        store, FakeEngine(), step=1, attempt=1, training_state={}, world=World(), guard=lambda: None, origin=origin
    ).wait()
    (found,) = list_checkpoints(store)
    assert found.metric("text", "loss") == 1.5
    assert found.metric("text", "bits_per_byte") is None


def test_a_failed_save_leaves_the_only_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    first = store_one(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "put_stream", lambda *_: (_ for _ in ()).throw(StoreError("no space left")))
        with pytest.raises(StoreError, match="no space left"):
            store_one(store, 2)
    prune(store, Retention(1), lambda: None)
    assert [info.name for info in list_checkpoints(store) if info.problem is None] == [first]
    with open_verified(store, first) as (manifest, _):
        assert manifest.step == 1


def test_what_is_read_or_pinned_is_not_deleted(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    names = [store_one(store, step) for step in (1, 2, 3, 4)]
    pin(store, names[1])
    with reading(store, names[0], "test"):
        assert prune(store, Retention(1), lambda: None) == [names[2]]
    for open_it in (open_verified, lambda *of: open_weights(*of, "export")):  # what an export and a reader of all open
        with open_it(store, names[0]):
            assert prune(store, Retention(1), lambda: None) == []
    assert prune(store, Retention(1), lambda: None) == [names[0]]
    assert unpin(store, names[1])
    assert not unpin(store, names[1])
    assert prune(store, Retention(1), lambda: None) == [names[1]]
    with pytest.raises(CheckpointError, match=f"checkpoint={names[1]} does not exist"):
        pin(store, names[1])


def test_a_lease_of_a_process_that_was_killed_does_not_count(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    names = [store_one(store, step) for step in (1, 2)]
    program = (
        "import os, sys\nfrom pretrain.checkpoint.holds import reading\nfrom pretrain.store import open_store\n"
        f"with reading(open_store({str(tmp_path)!r}), {names[0]!r}, 'export'):\n"
        "    print('reading', flush=True)\n    sys.stdin.read()\n    os.kill(os.getpid(), 9)\n"
    )
    reader = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert reader.stdout is not None
    assert reader.stdout.readline() == b"reading\n"
    assert holds_module.readers(store, names[0]) == [f"pid {reader.pid} on {os.uname().nodename} (export)"]
    assert prune(store, Retention(1), lambda: None) == []
    reader.communicate()
    assert prune(store, Retention(1), lambda: None) == [names[0]]


def test_a_reader_that_comes_while_the_manifest_goes_gets_it_back(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    name = store_one(store, 1)

    class Racing(type(store)):  # type: ignore[misc]
        def delete(self, key: str) -> None:
            super().delete(key)
            if key.endswith("MANIFEST.json"):  # the reader saw the manifest just before
                body = holds_module.encode_record({"process": holds_module.this_process().to_json(), "t": 0.0})
                store.put(f"{name}/readers/other.json", body)

    assert not holds_module.delete_unless_held(Racing(tmp_path), name)
    assert [info.problem for info in list_checkpoints(store)] == [None]


def test_reading_makes_no_folder_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    with reading(open_store(tmp_path), "step-00000001-a001", "test"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_commands_pin_and_unpin(run: Store, capsys: pytest.CaptureFixture[str]) -> None:
    name = store_one(run, 1)
    assert command(capsys, "pin", "run", name) == (
        0,
        f"{name} is kept until pretrain checkpoint unpin run {name}\n",
    )
    assert "whole, pinned" in command(capsys, "list", "run")[1]
    assert command(capsys, "unpin", "run", name) == (0, f"{name} is no longer pinned\n")
    code, text = command(capsys, "pin", "run", "step-00000009-a001")
    assert code == 2
    assert "does not exist" in text


def test_keep_best_without_its_metric_is_refused() -> None:
    best = ("checkpoint.keep_best.source=text", "checkpoint.keep_best.metric=loss")
    with pytest.raises(ConfigError, match=r"keep_best\.source=text is not a validation source"):
        load_config(CONFIG, [*best, "checkpoint.every_steps=4"])
