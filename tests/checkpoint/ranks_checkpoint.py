"""What the rank processes of this folder's tests run; each returns JSON."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint import Retention, list_checkpoints, prune, restore, save, weights_sha256
from pretrain.engine.distributed import barrier, vote
from pretrain.engine.engine import Engine
from pretrain.errors import FencedError, PretrainError, StoreError
from pretrain.store import Store, open_store
from pretrain.store.local import LocalStore
from pretrain.topology import World
from tests.engine.small import make_engine, run_config, train, whole_masters

OTHER_SEED = 77


def nothing() -> None:
    """A guard that always allows."""


def saved(
    engine: Engine, store: Store, world: World, step: int, attempt: int = 1, guard: Callable[[], None] = nothing
) -> str:
    """Saves and waits; every rank returns when the manifest is there."""
    state = {"step": step, "rows": 4 * step}
    handle = save(
        store, engine, step=step, attempt=attempt, training_state=state, world=world, guard=guard, patience_s=20
    )
    handle.wait()
    barrier()
    return handle.name


def snapshot(engine: Engine) -> list[dict[str, torch.Tensor]]:
    return [{key: view.clone() for key, view in fragment.tensors.items()} for fragment in engine.fragments()]


def same(left: list[dict[str, torch.Tensor]], right: list[dict[str, torch.Tensor]]) -> bool:
    """Bit for bit, keys included."""
    return all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) for a, b in zip(left, right, strict=True)
    )


def bitwise(world: World, folder: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Six steps against three, a save, and three more in a fresh engine of other initial weights."""
    results = []
    for number, case in enumerate(cases):
        config = run_config(dropout=0.1, **case)
        store = open_store(Path(folder) / str(number))
        whole = make_engine(config, world)
        history = train(whole, config, world, 0, 3)
        name = saved(whole, store, world, 3)
        history += train(whole, config, world, 3, 6)
        final, scalars = snapshot(whole), whole.optimizer_scalars()
        saved(whole, store.child("whole"), world, 6)
        whole.close()

        resumed = make_engine(config, world, seed=OTHER_SEED)
        found = restore(store, resumed, world)
        assert found is not None
        rest = train(resumed, config, world, 3, 6)
        saved(resumed, store.child("resumed"), world, 6)
        results.append(
            {
                "case": case,
                "restored": [found.name == name, found.step, found.training_state, found.skipped],
                "losses": rest == history[3:],
                "state": same(final, snapshot(resumed)),
                "scalars": scalars == resumed.optimizer_scalars(),
                "sha256": weights_sha256(store.child("whole"), "step-00000006-a001")
                == weights_sha256(store.child("resumed"), "step-00000006-a001"),
                "history": history,
            }
        )
        resumed.close()
    return results


def resume_others(world: World, folder: str, cases: list[dict[str, Any]]) -> list[list[list[float]]]:
    """Steps 3 to 5 from checkpoints that other ranks and stages saved."""
    results = []
    for case in cases:
        settings = {key: value for key, value in case.items() if key != "source"}
        config = run_config(dropout=0.1, **settings)
        engine = make_engine(config, world, seed=OTHER_SEED)
        found = restore(open_store(Path(folder) / str(case["source"])), engine, world)
        assert found is not None
        assert found.step == 3
        results.append(train(engine, config, world, 3, 6))
        engine.close()
    return results


def from_the_start(world: World, folder: str) -> dict[str, bool]:
    """A checkpoint of step 0, before the optimizer has any state, brings an engine that has stepped back to it."""
    results = {}
    for stage in range(4):
        config = run_config(stage, "bf16")
        store = open_store(Path(folder) / f"start-{stage}")
        engine = make_engine(config, world)
        saved(engine, store, world, 0)
        before = snapshot(engine)
        history = train(engine, config, world, 0, 2)
        restore(store, engine, world)
        fresh = same(before, snapshot(engine)) and not engine.optimizer_scalars()
        results[str(stage)] = fresh and train(engine, config, world, 0, 2) == history
        engine.close()
    return results


# ------------------------------------------------------------------------------------------- damage


def flip(path: Path, position: float) -> None:
    data = bytearray(path.read_bytes())
    data[min(len(data) - 1, int(position * len(data)))] ^= 0x10
    path.write_bytes(data)


def _cut(path: Path, fraction: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(fraction * len(data))])


def _rename_tensor(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"master|", b"mastar|", 1))


def _flipped(rank: int, position: float) -> Callable[[Path], None]:
    return lambda folder: flip(folder / f"rank-0000{rank}.safetensors", position)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "none": lambda folder: None,
    **{f"bit of rank {rank} at {at}": _flipped(rank, at) for rank in (0, 1) for at in (0.0, 0.01, 0.3, 0.77, 1.0)},
    "bit of manifest": lambda folder: flip(folder / "MANIFEST.json", 0.5),
    "manifest cut": lambda folder: _cut(folder / "MANIFEST.json", 0.5),
    "manifest empty": lambda folder: _cut(folder / "MANIFEST.json", 0.0),
    "manifest missing": lambda folder: (folder / "MANIFEST.json").unlink(),
    "file empty": lambda folder: _cut(folder / "rank-00001.safetensors", 0.0),
    "file cut": lambda folder: _cut(folder / "rank-00001.safetensors", 0.5),
    "file missing": lambda folder: (folder / "rank-00001.safetensors").unlink(),
    "tensor renamed": lambda folder: _rename_tensor(folder / "rank-00000.safetensors"),
    "only leftovers": lambda folder: [entry.unlink() for entry in folder.iterdir() if "00000" not in entry.name],
    "sidecars missing": lambda folder: [entry.unlink() for entry in folder.glob("rank-*.json")],
}  # fmt: skip


def damaged(world: World, folder: str) -> dict[str, Any]:
    """Restores beside each kind of damage to the newer of two checkpoints, and to both."""
    config = run_config(2, "bf16")
    original = Path(folder) / "original"
    engine = make_engine(config, world)
    train(engine, config, world, 0, 1)
    saved(engine, open_store(original), world, 1)
    first = snapshot(engine)
    train(engine, config, world, 1, 2)
    saved(engine, open_store(original), world, 2)
    second = snapshot(engine)
    results: dict[str, Any] = {}
    for kind, damage in DAMAGE.items():
        for both in (False, True):
            copy = Path(folder) / "copy"
            if world.is_main:
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(original, copy)
                damage(copy / "step-00000002-a001")
                if both:
                    damage(copy / "step-00000001-a001")
            barrier()
            label = f"{kind}, both" if both else kind
            try:
                found = restore(open_store(copy), engine, world)
                now = snapshot(engine)
                results[label] = found and {
                    "step": found.step,
                    "skipped": found.skipped,
                    "state": same(now, first if found.step == 1 else second),
                }
            except PretrainError as error:
                results[label] = {"error": f"{type(error).__name__}: {error}"}
            barrier()
    engine.close()
    return results


def misfits(world: World, folder: str) -> dict[str, str]:
    """Messages when what is asked for does not exist or does not fit."""
    store = open_store(Path(folder) / "misfits")
    config = run_config(1)
    engine = make_engine(config, world)
    empty = restore(store, engine, world)
    train(engine, config, world, 0, 1)
    saved(engine, store, world, 1)
    messages = {
        "empty": str(empty),
        "absent": _message(lambda: restore(store, engine, world, name="step-00000999-a001")),
    }
    again = restore(store, engine, world, name="step-00000001-a001")
    messages["named"] = again.name if again else "none"
    engine.close()
    others = {
        "one layer more": run_config(1, num_layers=3),
        "one layer less": run_config(3, num_layers=1),
        "other optimizer": run_config(1, optimizer={"kind": "sgd", "learning_rate": 0.1}),
    }
    for label, other in others.items():
        engine = make_engine(other, world)
        messages[label] = _message(lambda engine=engine: restore(store, engine, world))  # type: ignore[misc]
        engine.close()
    # Another directory on rank 1 than on rank 0: both must end with the same message.
    engine = make_engine(config, world)
    own = store if world.is_main else open_store(Path(folder) / "elsewhere")
    messages["hidden from rank 1"] = _message(lambda: restore(own, engine, world))
    engine.close()
    return messages


def _message(call: Callable[[], Any]) -> str:
    try:
        return f"no error: {call()}"
    except PretrainError as error:
        return f"{type(error).__name__}: {error}"


# -------------------------------------------------------------------------------------------- saving


class SlowStore(LocalStore):
    """Writes big files only when told to."""

    def __init__(self, root: str | Path, gate: Path) -> None:
        super().__init__(root)
        self._gate = gate

    def put_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        if key.endswith(".safetensors"):
            while not self._gate.exists():
                time.sleep(0.01)
        return super().put_stream(key, chunks)

    def child(self, prefix: str) -> Store:
        return SlowStore(os.path.join(self.url, prefix), self._gate)


class FailingStore(LocalStore):
    """Has no space for big files."""

    def put_stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> int:
        if key.endswith(".safetensors"):
            raise StoreError(f"cannot write {key}: No space left on device.")
        return super().put_stream(key, chunks)

    def child(self, prefix: str) -> Store:
        return FailingStore(os.path.join(self.url, prefix))


def overlapping(world: World, folder: str) -> dict[str, Any]:
    """Training goes on while a save waits for its disk; what is saved is the state at the call."""
    config = run_config(2, "bf16")
    gate = Path(folder) / "open"
    store = SlowStore(Path(folder) / "overlapping", gate)
    engine = make_engine(config, world)
    train(engine, config, world, 0, 1)
    before = snapshot(engine)
    handle = save(store, engine, step=1, attempt=1, training_state={}, world=world, guard=nothing)
    train(engine, config, world, 1, 4)
    pending = not handle.done and [info.problem for info in list_checkpoints(store)] in ([], ["no manifest"])
    barrier()
    gate.touch()
    handle.wait()
    barrier()
    restore(store, engine, world)
    result = {"pending": pending, "state": same(before, snapshot(engine))}
    engine.close()
    return result


def failing_rank(world: World, folder: str) -> dict[str, Any]:
    """Rank 1 has no space: rank 0 learns it at once, nothing is published, the next save works."""
    config = run_config(1)
    engine = make_engine(config, world)
    good = open_store(Path(folder) / "failing")
    train(engine, config, world, 0, 1)
    saved(engine, good, world, 1)
    bad = FailingStore(good.url) if world.rank == 1 else good
    started = time.monotonic()
    handle = save(bad, engine, step=2, attempt=1, training_state={}, world=world, guard=nothing, patience_s=20)
    message = _message(handle.wait)
    waited_s = time.monotonic() - started
    barrier()
    left = [(info.name, info.problem) for info in list_checkpoints(good)]
    saved(engine, good, world, 2)  # the same step again: files of the first try must not be mixed in
    after = [(info.name, info.problem) for info in list_checkpoints(good)]
    restore(good, engine, world)
    engine.close()
    return {"message": message, "waited_s": waited_s, "left": left, "after": after}


def fenced(world: World, folder: str) -> dict[str, Any]:
    """A guard that says no: nothing is published and nothing deleted."""

    def refuse() -> None:
        raise FencedError("a newer attempt has the run")

    config = run_config(0)
    engine = make_engine(config, world)
    store = open_store(Path(folder) / "fenced")
    handle = save(store, engine, step=1, attempt=1, training_state={}, world=world, guard=refuse)
    message = _message(handle.wait)
    barrier()
    names = store.names("step-00000001-a001")
    saved(engine, store, world, 2)
    saved(engine, store, world, 3)
    pruned = _message(lambda: prune(store, Retention(1), refuse))
    kept = [info.name for info in list_checkpoints(store)]
    engine.close()
    return {"message": message, "names": names, "pruned": pruned, "kept": kept}


def disk_full(world: World, folder: str) -> dict[str, Any]:
    """A real limit on the size of files, hit in the middle of a file."""
    config = run_config(1)
    engine = make_engine(config, world)
    store = open_store(Path(folder) / "full")
    saved(engine, store, world, 1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
    handle = save(store, engine, step=2, attempt=1, training_state={}, world=world, guard=nothing)
    message = _message(handle.wait)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    left = sorted(os.listdir(Path(store.url) / "step-00000002-a001"))
    found = restore(store, engine, world)
    saved(engine, store, world, 3)
    newest = list_checkpoints(store)[0].name
    engine.close()
    return {"message": message, "left": left, "restored": found and found.name, "newest": newest}


def killed_while_saving(world: World, folder: str) -> None:
    """Dies with one checkpoint published and the next half written."""
    config = run_config(2)
    engine = make_engine(config, world)
    train(engine, config, world, 0, 1)
    saved(engine, open_store(folder), world, 1)
    store = SlowStore(folder, Path(folder) / "never") if world.rank == 1 else open_store(folder)
    save(store, engine, step=2, attempt=1, training_state={}, world=world, guard=nothing)
    while not (Path(folder) / "step-00000002-a001" / "rank-00000.json").exists():
        time.sleep(0.01)
    vote(True)
    os.kill(os.getpid(), signal.SIGKILL)


def restart_after_kill(world: World, folder: str) -> dict[str, Any]:
    """What the next attempt finds, and what remains after its first save."""
    config = run_config(3)
    engine = make_engine(config, world)
    store = open_store(folder)
    found = restore(store, engine, world)
    assert found is not None
    train(engine, config, world, 1, 2)
    saved(engine, store, world, 2, attempt=2)
    pruned = prune(store, Retention(1), nothing) if world.is_main else []
    barrier()
    left = [info.name for info in list_checkpoints(store)]
    engine.close()
    return {"step": found.step, "skipped": found.skipped, "pruned": pruned, "left": left}


def several(world: World, folder: str, calls: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Results of several functions of this module by name: starting a rank costs more than what they do."""
    return {name: globals()[name](world, folder, **arguments) for name, arguments in calls.items()}


def remote(world: World, folder: str) -> dict[str, Any]:
    """The same over an object store, which has neither mmap nor rename."""
    config = run_config(3, "bf16")
    store = open_store("memory://checkpoints")
    engine = make_engine(config, world)
    train(engine, config, world, 0, 1)
    saved(engine, store, world, 1)
    before = snapshot(engine)
    masters = whole_masters(engine)
    train(engine, config, world, 1, 2)
    found = restore(store, engine, world)
    result = {
        "step": found and found.step,
        "state": same(before, snapshot(engine)),
        "weights": weights_sha256(store, "step-00000001-a001"),
        "parameters": sorted(masters),
        "json": json.dumps([info.to_json() for info in list_checkpoints(store)]),
    }
    engine.close()
    return result
