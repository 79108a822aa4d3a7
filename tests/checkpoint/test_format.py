"""The format without ranks: coverage, names, retention, the real safetensors library, offline reading, commands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

from pretrain.checkpoint import (
    CheckpointInfo,
    Retention,
    diff_checkpoints,
    list_checkpoints,
    newest_checkpoint,
    prepare_copy,
    prune,
    read_weights,
    save,
    verify_checkpoint,
    weights_sha256,
)
from pretrain.checkpoint.copy import idle_copies
from pretrain.checkpoint.files import read_manifest
from pretrain.checkpoint.format import FileEntry, Manifest, checkpoint_name, parse_name
from pretrain.checkpoint.retention import disposable
from pretrain.engine.state import (
    MASTER,
    Fragment,
    GroupSpec,
    OptimizerSpec,
    Scalars,
    probe_optimizer,
    share_of_replicated,
)
from pretrain.errors import CheckpointError, UserError
from pretrain.store import Store, open_store
from pretrain.topology import World

SHAPES = {"embedding": (7, 3), "b": (5,), "a": (2, 2, 2)}


class FakeEngine:
    """One of `size` ranks that share the same logical state: weight i of parameter p is 100 p + i + bump."""

    def __init__(self, rank: int = 0, size: int = 1, bump: float = 0.0) -> None:
        self._rank, self._size = rank, size
        self._whole = []
        for number, (name, shape) in enumerate(SHAPES.items()):
            flat = torch.arange(torch.Size(shape).numel(), dtype=torch.float32) + 100 * number
            tensors = {MASTER: flat + bump, "exp_avg": -flat, "exp_avg_sq": flat * flat}
            self._whole.append(Fragment(name, shape, 0, tensors))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(SHAPES)

    def groups(self) -> dict[str, str]:
        return dict.fromkeys(SHAPES, "decay")

    def optimizer_spec(self) -> OptimizerSpec:
        return OptimizerSpec("AdamW", {"decay": GroupSpec(("exp_avg", "exp_avg_sq"), ("step",))})

    def fragments(self) -> list[Fragment]:
        return share_of_replicated(self._whole, self._rank, self._size)

    def optimizer_scalars(self) -> Scalars:
        return {"decay": {"step": 4.0}}

    def hyperparameters(self) -> dict[str, dict[str, Any]]:
        return {"decay": {"lr": 0.1, "betas": (0.9, 0.95)}}

    def begin_restore(self, element_keys: Mapping[str, tuple[str, ...]], scalars: Scalars) -> list[Fragment]:
        raise NotImplementedError

    def end_restore(self) -> None:
        raise NotImplementedError


def store_one(store: Store, step: int = 1, attempt: int = 1, bump: float = 0.0) -> str:
    handle = save(
        store,
        FakeEngine(bump=bump),
        step=step,
        attempt=attempt,
        training_state={"step": step},
        world=World(),
        guard=lambda: None,
    )
    handle.wait()
    assert handle.done
    return handle.name


def test_other_tools_read_the_files(tmp_path: Path) -> None:
    name = store_one(open_store(tmp_path))
    with safetensors.safe_open(tmp_path / name / "rank-00000.safetensors", framework="pt") as file:
        assert file.metadata()["checkpoint"] == name
        assert set(file.keys()) == {f"{key}|{p}" for key in (MASTER, "exp_avg", "exp_avg_sq") for p in SHAPES}
        assert torch.equal(file.get_tensor("master|b"), torch.arange(5.0) + 100)
        assert torch.equal(file.get_tensor("exp_avg|a"), -(torch.arange(8.0) + 200))


def test_the_first_save_finds_memory_that_was_touched_before(tmp_path: Path) -> None:
    engine = FakeEngine()
    thread = prepare_copy(engine)
    assert thread is not None
    thread.join()
    address = idle_copies(engine)[0].data.data_ptr()
    save(
        open_store(tmp_path), engine, step=1, attempt=1, training_state={}, world=World(), guard=lambda: None
    ).wait()  # fmt: skip
    assert [copy.data.data_ptr() for copy in idle_copies(engine)] == [address]
    assert prepare_copy(engine) is None


def test_nothing_is_pickled(tmp_path: Path) -> None:
    name = store_one(open_store(tmp_path))
    files = sorted(path.name for path in (tmp_path / name).iterdir())
    assert files == ["MANIFEST.json", "rank-00000.json", "rank-00000.safetensors"]


def test_weights_come_back_whole_and_their_hash_depends_on_every_bit(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    name = store_one(store)
    weights = read_weights(store, name)
    assert list(weights) == list(SHAPES)
    assert torch.equal(weights["embedding"], torch.arange(21.0).view(7, 3))
    same, other = store_one(store, 2), store_one(store, 3, bump=1e-3)
    assert weights_sha256(store, name) == weights_sha256(store, same) != weights_sha256(store, other)


def test_a_difference_names_parameter_and_size(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first, second = store_one(store, 1), store_one(store, 2, bump=0.5)
    assert all(d.equal for d in diff_checkpoints(store, first, store, first))
    unequal = [d for d in diff_checkpoints(store, first, store, second) if not d.equal]
    assert [(d.parameter, d.key, d.max_abs) for d in unequal] == [(name, MASTER, 0.5) for name in SHAPES]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 40])
def test_the_shares_of_all_ranks_cover_every_element_once(size: int) -> None:
    order = list(SHAPES)
    files = []
    for rank in range(size):
        fragments = FakeEngine(rank, size).fragments()
        for fragment in fragments:
            whole = torch.arange(fragment.numel) + 100.0 * order.index(fragment.name)
            assert torch.equal(fragment.tensors[MASTER], whole[fragment.start : fragment.start + fragment.length])
        ranges = tuple((order.index(f.name), f.start, f.length) for f in fragments)
        if ranges:  # with more ranks than elements some have none
            files.append(FileEntry(f"{rank}", 0, (), "", ranges))
    manifest = Manifest(1, 1, "", dict(SHAPES), {}, {}, {}, {}, tuple(files))
    assert manifest.first_hole() is None
    assert Manifest(1, 1, "", dict(SHAPES), {}, {}, {}, {}, tuple(files[1:])).first_hole() is not None
    assert Manifest(1, 1, "", dict(SHAPES), {}, {}, {}, {}, (*files, files[0])).first_hole() is not None


def test_a_manifest_that_does_not_cover_everything_or_is_of_another_format_is_refused() -> None:
    manifest = Manifest(1, 1, "x", dict(SHAPES), dict.fromkeys(SHAPES, "decay"), {}, {}, {}, ())
    with pytest.raises(CheckpointError, match="does not cover embedding exactly once"):
        Manifest.decode(manifest.encode(), "somewhere")
    with pytest.raises(CheckpointError, match="somewhere is damaged"):
        Manifest.decode(manifest.encode().replace(b'"step": 1', b'"step": 2'), "somewhere")


def test_newest_is_the_latest_attempt_and_names_round_trip() -> None:
    assert checkpoint_name(1200, 3) == "step-00001200-a003"
    assert parse_name("step-00001200-a003") == (3, 1200)
    assert parse_name("step-1-a3") is None
    names = [checkpoint_name(1200, 3), checkpoint_name(1100, 4), checkpoint_name(123456789, 1)]
    assert max(names, key=lambda name: parse_name(name) or (0, 0)) == "step-00001100-a004"


def test_a_folder_under_a_wrong_name_is_no_checkpoint(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    name = store_one(store)
    (tmp_path / name).rename(tmp_path / "step-00000009-a001")
    assert "is the manifest of step-00000001-a001" in (list_checkpoints(store)[0].problem or "")
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        newest_checkpoint(store)


def info(step: int, attempt: int = 1, problem: str | None = None) -> CheckpointInfo:
    return CheckpointInfo(checkpoint_name(step, attempt), step, attempt, 1, 1, problem)


def test_retention_keeps_the_newest_good_ones_and_what_may_still_be_written() -> None:
    unfinished = CheckpointInfo.UNFINISHED
    found = [
        info(50, 2, unfinished),  # may be under way
        info(40, 2, "rank-00000.safetensors is missing"),
        info(30, 2),
        info(20, 2, unfinished),
        info(90, 1, "damaged"),
        info(10, 1),
        info(9, 1),
        info(8, 1, "damaged"),
    ]
    assert [i.step for i in disposable(found, Retention(2))] == [20, 9, 8]
    assert [i.step for i in disposable(found, Retention(1))] == [20, 90, 10, 9, 8]
    assert [i.step for i in disposable(found, Retention(9))] == [20]
    assert disposable([info(2, 1, unfinished), info(1, 1, "damaged")], Retention(1)) == []


def test_pruning_asks_the_guard_before_each_deletion_and_refuses_to_delete_all(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    names = [store_one(store, step) for step in (1, 2, 3)]
    asked: list[int] = []
    assert prune(store, Retention(1), lambda: asked.append(1)) == [names[1], names[0]]
    assert len(asked) == 2
    assert [i.name for i in list_checkpoints(store)] == [names[2]]
    with pytest.raises(UserError, match="keep_last=0"):
        prune(store, Retention(0), lambda: None)


def test_the_optimizer_is_asked_what_it_keeps_of_each_group() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    groups = [{"params": [weight], "name": "decay"}]
    adamw = torch.optim.AdamW(groups, lr=0.1, fused=True)
    assert probe_optimizer(adamw) == OptimizerSpec("AdamW", {"decay": GroupSpec(("exp_avg", "exp_avg_sq"), ("step",))})
    other = {"params": [torch.nn.Parameter(torch.zeros(3))], "name": "plain", "momentum": 0.0}
    momentum = torch.optim.SGD([{"params": [weight], "name": "decay"}, other], lr=0.1, momentum=0.9)
    kept = {"decay": GroupSpec(("momentum_buffer",), ()), "plain": GroupSpec((), ())}
    assert probe_optimizer(momentum) == OptimizerSpec("SGD", kept)
    assert torch.equal(weight, torch.zeros(3))


def test_the_manifest_records_what_an_inspector_wants(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    manifest = read_manifest(store, store_one(store))
    (group,) = manifest.optimizer["groups"].values()
    assert group["hyperparameters"] == {"lr": 0.1, "betas": [0.9, 0.95]}
    assert group["scalars"] == {"step": 4.0}
    assert group["element_keys"] == ["exp_avg", "exp_avg_sq"]
    assert manifest.origin["ranks"] == 1
    assert manifest.training_state == {"step": 1}


# ----------------------------------------------------------------------------------------- commands


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Checkpoints of a run that the commands can find by path."""
    from pretrain.rundir import RunDirectory

    store = open_store(tmp_path / "run")

    class Found:
        checkpoints = store.child("checkpoints")

    monkeypatch.setattr(RunDirectory, "locate", classmethod(lambda cls, name: Found()))
    return Found.checkpoints


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    from launch.cli import main

    code = main(["checkpoint", *words])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_the_list_shows_newest_first_with_reasons(run: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(capsys, "list", "run") == (0, "no checkpoints yet\n")
    first, second = store_one(run, 1), store_one(run, 2)
    run.delete(f"{second}/MANIFEST.json")
    code, text = command(capsys, "list", "run")
    assert code == 0
    lines = text.splitlines()
    assert lines[1].startswith(second)
    assert lines[1].endswith("never published")
    assert lines[2].startswith(first)
    assert lines[2].endswith("whole")
    code, text = command(capsys, "list", "run", "--json")
    assert [row["problem"] is None for row in json.loads(text)] == [False, True]


def test_verify_finds_one_flipped_bit(run: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(capsys, "verify", "run")[0] == 2
    first, second = store_one(run, 1), store_one(run, 2)
    assert command(capsys, "verify", "run")[0] == 0
    path = run.local_path(f"{second}/rank-00000.safetensors")
    assert path is not None
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    assert verify_checkpoint(run, first) == []
    code, text = command(capsys, "verify", "run", "--json")
    assert code == 2
    assert [row["good"] for row in json.loads(text)] == [False, True]
    code, text = command(capsys, "verify", "run", second)
    assert code == 2
    assert "does not match its sha256" in text
    code, text = command(capsys, "verify", "run", "step-00000777-a001")
    assert code == 2
    assert "does not exist" in text
    with pytest.raises(CheckpointError, match="is damaged"):
        read_weights(run, second)


def test_diff_says_equal_or_which_tensors_differ(run: Store, capsys: pytest.CaptureFixture[str]) -> None:
    names = [store_one(run, 1), store_one(run, 2), store_one(run, 3, bump=2.0)]
    code, text = command(capsys, "diff", f"run:{names[0]}", f":{names[1]}")
    assert code == 0
    assert text.endswith("equal bit for bit\n")
    code, text = command(capsys, "diff", f"run:{names[0]}", "run", "--json")
    answer = json.loads(text)
    assert code == 3
    assert [entry["parameter"] for entry in answer["unequal"]] == list(SHAPES)
    assert answer["checkpoints"][1]["checkpoint"].endswith(names[2])
