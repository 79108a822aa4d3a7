"""Old checkpoints go beside the loop: nobody waits for a slow store, and a fenced attempt deletes nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pretrain.checkpoint import Retention
from pretrain.errors import FencedError, StoreError
from pretrain.log import Log
from pretrain.store.local import LocalStore
from pretrain.train.pruning import Pruner
from tests.checkpoint.test_format import store_one


class Slow(LocalStore):
    """Deletes a manifest only when the gate is open, or refuses."""

    gate = threading.Event()
    refuse = False

    def delete(self, key: str) -> None:
        if key.endswith("MANIFEST.json"):
            Slow.gate.wait(20)
            if Slow.refuse:
                raise StoreError(f"cannot delete {key}: the server says 503.")
        super().delete(key)

    def child(self, prefix: str) -> Slow:
        return Slow(f"{self.url}/{prefix}")


def nothing() -> None: ...


@pytest.fixture
def store(tmp_path: Path) -> Slow:
    Slow.gate.clear()
    Slow.refuse = False
    found = Slow(tmp_path)
    for step in (1, 2, 3, 4):
        store_one(found, step)
    return found


def steps(store: LocalStore) -> list[int]:
    return sorted(int(name[5:13]) for name in store.names() if store.exists(f"{name}/MANIFEST.json"))


def test_the_loop_goes_on_while_a_slow_store_deletes_and_each_deletion_is_a_sign_of_life(store: Slow) -> None:
    pruner = Pruner(store, Retention(keep_last=1), nothing, Log())
    pruner.begin()  # returns although nothing can be deleted yet
    assert steps(store) == [1, 2, 3, 4]
    beats: list[int] = []
    threading.Timer(0.3, Slow.gate.set).start()
    pruner.finish(lambda: beats.append(1))
    assert steps(store) == [4]
    assert len(beats) >= 1
    # Of 4 checkpoints folder and file are looked at; of 3 file and sidecar are deleted, behind their manifests.
    assert pruner._looks == 4 * 2 + 3 * 2
    assert not [thread for thread in threading.enumerate() if thread.name == "prune"]


def test_a_fenced_attempt_deletes_nothing_and_is_told_when_it_waits(store: Slow) -> None:
    def guard() -> None:
        raise FencedError("attempt 2 has the run")

    Slow.gate.set()
    pruner = Pruner(store, Retention(keep_last=1), guard, Log())
    pruner.begin()
    with pytest.raises(FencedError, match="attempt 2 has the run"):
        pruner.finish()
    assert steps(store) == [1, 2, 3, 4]


def test_what_cannot_be_deleted_costs_a_warning_only(store: Slow, capfd: pytest.CaptureFixture[str]) -> None:
    Slow.gate.set()
    Slow.refuse = True
    pruner = Pruner(store, Retention(keep_last=1), nothing, Log())
    pruner.begin()
    pruner.finish()
    assert steps(store) == [1, 2, 3, 4]
    told = capfd.readouterr().err
    assert "could not be pruned" in told
    assert "503" in told
    Slow.refuse = False
    pruner.begin()
    pruner.finish()
    assert steps(store) == [4]
