"""Rank programs for the memory tier: nodes are played by ranks that see different folders and call themselves so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint import MemoryTier, memory, restore, save
from pretrain.engine.distributed import barrier
from pretrain.engine.engine import Engine
from pretrain.rundir.memory_folders import MemoryOwner
from pretrain.store import open_store
from pretrain.topology import World
from tests.checkpoint.ranks_checkpoint import OTHER_SEED, nothing, same, saved, snapshot
from tests.engine.small import make_engine, run_config, train, whole_masters

OWNER = MemoryOwner("/nowhere", "0123")


def _tier(folder: Path, node: int, world: World, *, with_partner: bool = True) -> MemoryTier:
    base = folder / f"node-{node}"
    base.mkdir(parents=True, exist_ok=True)
    memory._identify = lambda _base: (f"node-{node}", "")
    return MemoryTier.open(base, OWNER, world, with_partner=with_partner)


def _copy(tier: MemoryTier, engine: Engine, world: World, step: int) -> str:
    handle = save(
        tier.store, engine, step=step, attempt=1, training_state={"step": step}, world=world, guard=nothing,
        in_parts=True, partner=tier.partner,
    )  # fmt: skip
    handle.wait()
    assert handle.warning == ""
    barrier()
    return handle.name


def several_nodes(world: World, folder: str) -> dict[str, Any]:
    """Ranks 0 and 1 on node 0, rank 2 on node 1, no partners; then other places, stages, lost nodes, lost bits."""
    root = Path(folder)
    config = run_config(1, "bf16")
    engine = make_engine(config, world)
    durable = open_store(root / "durable")
    train(engine, config, world, 0, 1)
    saved(engine, durable, world, 1)
    first = snapshot(engine)
    tier = _tier(root, world.rank // 2, world, with_partner=False)
    train(engine, config, world, 1, 2)
    _copy(tier, engine, world, 2)
    second, masters = snapshot(engine), whole_masters(engine)
    result: dict[str, Any] = {"leader": tier.is_leader, "ranks_here": tier.ranks_here, "partner": tier.partner is None}
    engine.close()

    def restored(label: str, stage: int, seen: MemoryTier) -> None:
        fresh = make_engine(run_config(stage, "bf16"), world, seed=OTHER_SEED)
        found = restore(durable, fresh, world, memory=seen)
        assert found is not None
        if stage == 1:
            equal = same(second if found.from_memory else first, snapshot(fresh))
        else:
            equal = all(torch.equal(masters[name], value) for name, value in whole_masters(fresh).items())
        result[label] = [found.name, found.from_memory, found.skipped, equal, found.notes]
        fresh.close()
        barrier()
        seen.close()

    restored("same places", 1, tier)
    # Stage 0 needs everything on every rank, and stage 3 other ranges: read from the other node.
    restored("stage 0", 0, _tier(root, world.rank // 2, world))
    restored("stage 3", 3, _tier(root, world.rank // 2, world))
    # Rank 1 wakes up on the other node: what it owned lies on the first.
    restored("moved", 1, _tier(root, [0, 1, 1][world.rank], world))
    # Node 1 is replaced by an empty one.
    restored("lost node", 1, _tier(root, [0, 0, 7][world.rank], world))
    if world.rank == 2:
        _flip(next(tier._folder.rglob("rank-00002.safetensors")))
    barrier()
    restored("flipped bit", 1, _tier(root, world.rank // 2, world))
    return result


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)


def partners(world: World, folder: str) -> dict[str, Any]:
    """Three nodes of a rank each; every one is lost in turn, then one and a bit, then two at once."""
    root = Path(folder) / "ring"
    config = run_config(2, "bf16")
    engine = make_engine(config, world)
    durable = open_store(root / "durable")
    tier = _tier(root, world.rank, world)
    train(engine, config, world, 0, 2)
    name = _copy(tier, engine, world, 2)
    state, here = snapshot(engine), sorted(path.name for path in (tier._folder / name).iterdir())
    engine.close()
    tier.close()
    result: dict[str, Any] = {"files": here}

    def restored(label: str, node: int, damage: str = "") -> None:
        if damage and world.is_main:
            _flip(next((root / "node-1").rglob(damage)))
        barrier()
        seen = _tier(root, node, world)
        fresh = make_engine(config, world, seed=OTHER_SEED)
        before = snapshot(fresh)
        found = restore(durable, fresh, world, memory=seen)
        equal = same(state if found else before, snapshot(fresh))
        told = [why for _, why in seen.passed_over]
        result[label] = [found and [found.from_memory, found.step], equal, told, found.notes if found else []]
        fresh.close()
        barrier()
        seen.close()

    for lost in range(3):
        restored(f"node {lost} lost", 10 + lost if world.rank == lost else world.rank)
    # A flipped bit in one of two copies: the other one is asked.
    restored("a bit of one copy", world.rank, "rank-00001.safetensors")
    restored("a bit of one copy, the other lost", 20 if world.rank == 2 else world.rank)
    restored("two nodes lost", [0, 30, 31][world.rank])
    return result


def housekeeping(world: World, folder: str) -> dict[str, Any]:
    """Old copies go when the next one is begun, all go at the end, by the node's first rank only."""
    config = run_config(2)
    engine = make_engine(config, world)
    tier = _tier(Path(folder) / "kept", 0, world)
    names = []
    for step in (1, 2, 3):
        tier.keep(names[-1:])
        names.append(_copy(tier, engine, world, step))
    left = [copy.name for copy in tier.copies()]
    held = tier.held_bytes()
    barrier()
    tier.discard()
    barrier()
    result = {"left": left, "held": held, "gone": not Path(tier.store.url).exists()}
    engine.close()
    return result


def both(world: World, folder: str) -> dict[str, Any]:
    return {
        "several_nodes": several_nodes(world, folder),
        "partners": partners(world, folder),
        "housekeeping": housekeeping(world, folder),
    }
