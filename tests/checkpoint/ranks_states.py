"""Rank programs for every kind of state: Muon, offload, bf16, frozen parameters, buffers; and chains of resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint import (
    Selection,
    list_checkpoints,
    read_weights,
    restore,
    start_from,
    take_back,
    verify_checkpoint,
)
from pretrain.checkpoint.files import read_manifest
from pretrain.config.schema import RunConfig
from pretrain.engine.distributed import barrier
from pretrain.engine.engine import Engine
from pretrain.errors import PretrainError
from pretrain.model.registry import build_model
from pretrain.store import open_store
from pretrain.topology import World
from tests.checkpoint.ranks_checkpoint import OTHER_SEED, flip, same, saved, snapshot
from tests.engine.small import DEVICE, make_engine, run_config, train, whole_masters


def make_partly_fixed(config: RunConfig, world: World, seed: int) -> Engine:
    """The tiny model with its first layer frozen, and two buffers: whole numbers, and a scale."""
    model = build_model(config.model, config.loss, seed=seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "layers.0." not in name
    model.register_buffer("seen", torch.arange(5) + seed)
    model.register_buffer("scale", torch.full((2, 3), 1.0 + seed))
    model.register_buffer("forgotten", torch.zeros(3), persistent=False)
    return Engine(model, config, world, DEVICE)


def _engine(case: dict[str, Any], world: World, seed: int = 5) -> tuple[RunConfig, Engine]:
    settings = {key: value for key, value in case.items() if key != "fixed"}
    config = run_config(dropout=0.1, **settings)
    make = make_partly_fixed if case.get("fixed") else make_engine
    return config, make(config, world, seed)


def everything(world: World, folder: str, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """All functions of this module but the chain: starting ranks costs more than what they do."""
    return {
        **bitwise(world, f"{folder}/bitwise", cases),
        "starts": starts(world, f"{folder}/starts"),
        "set aside": set_aside_and_taken_back(world, f"{folder}/set-aside"),
    }


def bitwise(world: World, folder: str, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Five steps against three, a save, and two more in a fresh engine of other initial weights."""
    results: dict[str, Any] = {}
    for number, (name, case) in enumerate(cases.items()):
        store = open_store(Path(folder) / str(number))
        config, engine = _engine(case, world)
        train(engine, config, world, 0, 2)
        if case.get("fixed"):
            engine.module.seen += 100
        history = train(engine, config, world, 2, 3)
        saved(engine, store, world, 3)
        history = train(engine, config, world, 3, 5)
        final, scalars = snapshot(engine), engine.optimizer_scalars()
        engine_is_tied = engine.module.head.weight is engine.module.embedding.weight
        engine.close()

        config, resumed = _engine(case, world, OTHER_SEED)
        found = restore(store, resumed, world)
        rest = train(resumed, config, world, 3, 5)
        manifest = read_manifest(store, "step-00000003-a001")
        results[name] = {
            "restored": found and found.step,
            "losses": rest == history,
            "state": same(final, snapshot(resumed)),
            "scalars": scalars == resumed.optimizer_scalars(),
            "tied": engine_is_tied and resumed.module.head.weight is resumed.module.embedding.weight,
            "names": list(manifest.parameters),
            "seen": resumed.module.seen.tolist() if case.get("fixed") else None,
            "groups": {group: kept["element_keys"] for group, kept in manifest.optimizer["groups"].items()},
            "kinds": sorted(set(manifest.groups.values())),
            "bytes": manifest.total_bytes,
            "shares": [sum(count for _, _, count in file.ranges) for file in manifest.files],
            "numbers": sum(count for file in manifest.files for _, _, count in file.ranges),
            "whole": sum(torch.Size(shape).numel() for shape in manifest.parameters.values()),
        }
        resumed.close()
    return results


def link(world: World, folder: str, case: dict[str, Any], first: int, last: int, write: bool) -> list[list[float]]:
    """One part of a chain: goes on from what is there, trains, saves."""
    store = open_store(folder)
    config, engine = _engine(case, world, 5 if first == 0 else OTHER_SEED)
    found = restore(store, engine, world)
    assert (found.step if found else 0) == first
    history = train(engine, config, world, first, last)
    if write:
        saved(engine, store, world, last)
    engine.close()
    return history


def _message(call: Callable[[], Any]) -> str:
    try:
        return f"no error: {call()}"
    except PretrainError as error:
        return f"{type(error).__name__}: {error}"


def starts(world: World, folder: str) -> dict[str, Any]:
    """New runs from a checkpoint of two ranks: all weights or some, another optimizer or the same one."""
    store, name = open_store(folder), "step-00000003-a001"
    config, engine = _engine({"zero_stage": 2}, world)
    train(engine, config, world, 0, 3)
    saved(engine, store, world, 3)
    history = train(engine, config, world, 3, 5)
    engine.close()
    source = read_weights(store, name)
    result: dict[str, Any] = {}

    def started(label: str, case: dict[str, Any], selection: Selection, **more: Any) -> Engine:
        _, fresh = _engine({**case, **more}, world, OTHER_SEED)
        before = whole_masters(fresh)
        told = start_from(store, name, fresh, world, selection)
        after = whole_masters(fresh)
        result[label] = {
            "taken": sorted(n for n in after if torch.equal(after[n], source[n])),
            "untouched": sorted(n for n in after if torch.equal(after[n], before[n])),
            "told": [told.step, told.taken, told.left, told.notes],
            "scalars": fresh.optimizer_scalars(),
        }
        return fresh

    sgd = {"kind": "sgd", "learning_rate": 0.1, "momentum": 0.9}
    started("weights", {"zero_stage": 3, "precision": "bf16"}, Selection(), optimizer=sgd).close()
    some = Selection(("layers.*", "norm*"), ("layers.1.*norm*",))
    started("some", {"zero_stage": 1}, some).close()
    started("bf16", {"zero_stage": 2, "precision": "bf16", "state_precision": "bf16"}, Selection()).close()
    kept = started("kept", {"zero_stage": 0}, Selection(with_optimizer=True))
    result["kept"]["history"] = [history, train(kept, config, world, 3, 5)]

    def refused(selection: Selection, checkpoint: str = name, engine: Engine = kept) -> str:
        return _message(lambda: start_from(store, checkpoint, engine, world, selection))

    result["errors"] = {
        "pattern": refused(Selection(("layer.*",))),
        "part with state": refused(Selection(leave_out=("layers.0.*",), with_optimizer=True)),
        "absent": refused(Selection(), "step-00000009-a001"),
    }
    kept.close()
    _, larger = _engine({"zero_stage": 1, "num_layers": 3}, world)
    result["errors"]["larger"] = refused(Selection(), engine=larger)
    barrier()
    if world.is_main:
        flip(Path(folder) / name / "rank-00001.safetensors", 0.8)
    barrier()
    result["errors"]["damaged"] = refused(Selection(leave_out=("layers.2.*",)), engine=larger)
    larger.close()
    barrier()  # each rank has let go of its own
    result["readers"] = store.names(f"{name}/readers")
    return result


def set_aside_and_taken_back(world: World, folder: str) -> dict[str, Any]:
    """A damaged newest checkpoint is marked at the first restore, not read at the second, used again when mended."""
    store, config = open_store(folder), run_config(1)
    engine = make_engine(config, world)
    for step in (1, 2):
        train(engine, config, world, step - 1, step)
        saved(engine, store, world, step)
    newest = Path(folder) / "step-00000002-a001" / "rank-00000.safetensors"
    good = newest.read_bytes()
    barrier()
    if world.is_main:
        flip(newest, 0.9)
    barrier()
    first = restore(store, engine, world)
    barrier()
    listed = [(info.step, info.problem) for info in list_checkpoints(store)]
    second = restore(store, engine, world)
    if world.is_main:
        newest.write_bytes(good)
    barrier()
    problems = verify_checkpoint(store, "step-00000002-a001")
    still = restore(store, engine, world)
    barrier()
    back = take_back(store, "step-00000002-a001") if world.is_main else None
    barrier()
    third = restore(store, engine, world)
    engine.close()
    found = [(restored.step, restored.skipped) for restored in (first, second, still, third) if restored]
    return {"found": found, "listed": listed, "problems": problems, "back": back}
