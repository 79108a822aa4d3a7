"""Rank programs for the memory tier: nodes are played by ranks that see different folders and call themselves so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pretrain.checkpoint import MemoryTier, memory, restore, save
from pretrain.engine.distributed import barrier
from pretrain.engine.engine import Engine
from pretrain.rundir.memory_folders import MemoryOwner
from pretrain.store import open_store
from pretrain.topology import World
from tests.checkpoint.ranks_checkpoint import OTHER_SEED, nothing, same, saved, snapshot
from tests.engine.small import make_engine, run_config, train

OWNER = MemoryOwner("/nowhere", "0123")


def _tier(folder: Path, node: int, world: World) -> MemoryTier:
    base = folder / f"node-{node}"
    base.mkdir(parents=True, exist_ok=True)
    memory._identify = lambda _base: (f"node-{node}", "")
    return MemoryTier.open(base, OWNER, world)


def _copy(tier: MemoryTier, engine: Engine, world: World, step: int) -> str:
    handle = save(
        tier.store, engine, step=step, attempt=1, training_state={"step": step}, world=world, guard=nothing,
        in_parts=True,
    )  # fmt: skip
    handle.wait()
    barrier()
    return handle.name


def several_nodes(world: World, folder: str) -> dict[str, Any]:
    """Ranks 0 and 1 on node 0, rank 2 on node 1; then other places, other stages, lost nodes, lost bits."""
    root = Path(folder)
    config = run_config(1, "bf16")
    engine = make_engine(config, world)
    durable = open_store(root / "durable")
    train(engine, config, world, 0, 1)
    saved(engine, durable, world, 1)
    first = snapshot(engine)
    tier = _tier(root, world.rank // 2, world)
    train(engine, config, world, 1, 2)
    _copy(tier, engine, world, 2)
    second = snapshot(engine)
    result: dict[str, Any] = {"leader": tier.is_leader, "ranks_here": tier.ranks_here}
    engine.close()

    def restored(label: str, stage: int, seen: MemoryTier) -> None:
        fresh = make_engine(run_config(stage, "bf16"), world, seed=OTHER_SEED)
        found = restore(durable, fresh, world, memory=seen)
        assert found is not None
        expected = second if found.from_memory else first
        equal = same(expected, snapshot(fresh)) if stage == 1 else None
        result[label] = [found.name, found.from_memory, found.skipped, equal]
        fresh.close()

    restored("same places", 1, tier)
    # Stage 0 needs everything on every rank, and no rank sees it all.
    restored("stage 0", 0, tier)
    # Rank 1 wakes up on the other node: what it owned lies where it cannot read.
    restored("moved", 1, _tier(root, [0, 1, 1][world.rank], world))
    # Node 1 is replaced by an empty one.
    restored("lost node", 1, _tier(root, [0, 0, 7][world.rank], world))
    if world.rank == 2:
        path = next(tier._folder.rglob("rank-00002.safetensors"))
        data = bytearray(path.read_bytes())
        data[-5] ^= 4
        path.write_bytes(data)
    barrier()
    restored("flipped bit", 1, _tier(root, world.rank // 2, world))
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
    return {"several_nodes": several_nodes(world, folder), "housekeeping": housekeeping(world, folder)}
