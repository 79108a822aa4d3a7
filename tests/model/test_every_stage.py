"""Every registered family through ZeRO 0 to 3 on two ranks: the plain loop's losses, and bit for bit after a kill.

The ranks that train untouched are killed in the middle of a step; others, which know nothing but what was saved on
the way, go on from there. A new family joins by being registered: it needs a small config in
`tests.model.small.FAMILIES`, which the first test says.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.checkpoint import restore, save
from pretrain.config.schema import RunConfig
from pretrain.engine.distributed import all_reduce_sums
from pretrain.engine.engine import Engine
from pretrain.model.registry import build_model, family_names
from pretrain.sequence import IGNORED_LABEL, Batch
from pretrain.store import open_store
from pretrain.topology import World
from tests.model.small import FAMILIES, batch_for, empty_batch_for
from tests.ranks import run_ranks

ONE_EACH = {config().family: name for name, config in reversed(FAMILIES.items())}
"""Registered family -> the first of its small configs."""
STAGES = (0, 1, 2, 3)
CASES = [(name, stage) for name in ONE_EACH.values() for stage in STAGES]
MICRO_BATCHES, SAVED, STEPS = 3, 1, 3  # three on two ranks: the last round has an empty one
RATE = 1e-2
_OBJECTIVES = {"decoder": "causal_lm", "encoder_decoder": "seq2seq", "encoder": "masked_lm"}


def run_config(name: str, stage: int) -> RunConfig:
    model = FAMILIES[name](dropout=0.1)
    batch: dict[str, Any] = {"global_batch_size": MICRO_BATCHES, "micro_batch_size": 1, "sequence_length": 32}
    if model.layout == "encoder_decoder":
        batch["source_length"] = 32
    return RunConfig.model_validate(
        {
            "name": "small", "seed": 3, "tokenizer": "none", "data": {"sources": {"none": {"path": "none"}}},
            "objective": {"kind": _OBJECTIVES[model.layout]}, "model": model.model_dump(), "batch": batch,
            "loss": {"chunk_rows": 7, "z_loss": 1e-3},
            "optimizer": {"kind": "adamw", "learning_rate": RATE, "gradient_clipping": 0.5},
            "schedule": {"kind": "constant", "total_steps": STEPS}, "checkpoint": {"every_steps": SAVED},
            "engine": {"zero_stage": stage, "precision": "fp32", "persistence_threshold_elements": 100},
        }
    )  # fmt: skip


def batches_of(config: RunConfig, step: int) -> list[Batch]:
    return [batch_for(config.model, seed=10 * step + j) for j in range(MICRO_BATCHES)]


def train(engine: Engine, config: RunConfig, world: World, steps: range) -> list[float]:
    """Mean losses of the steps; a collective."""
    losses = []
    for step in steps:
        batches = batches_of(config, step)
        targets = sum(batch.target_tokens for batch in batches)
        mine = batches[world.rank :: world.size]
        mine += [empty_batch_for(config.model)] * (engine.accumulation_steps - len(mine))
        nll = sum(float(engine.micro_step(batch, global_target_tokens=targets).nll) for batch in mine)
        assert engine.step(RATE).applied
        losses.append(all_reduce_sums([nll])[0] / targets)
    return losses


def train_and_be_killed(world: World, folder: str) -> None:
    """Trains each family at each stage, saves on the way, writes down what came out. Runs in every rank."""
    found: dict[str, Any] = {}
    for name, stage in CASES:
        config, store = run_config(name, stage), open_store(f"{folder}/{name}-{stage}")
        engine = Engine(_model(config), config, world, torch.device("cpu"))
        losses = train(engine, config, world, range(SAVED))
        save(store, engine, step=SAVED, attempt=1, training_state={}, world=world, guard=lambda: None).wait()
        losses += train(engine, config, world, range(SAVED, STEPS))
        found[f"{name} {stage}"] = {"losses": losses, "state": _digest(engine)}
        if (name, stage) != CASES[-1]:
            engine.close()
    Path(folder, f"untouched-{world.rank}.json").write_text(json.dumps(found))
    all_reduce_sums([0])  # the other has written, too
    engine.micro_step(batches_of(config, STEPS)[world.rank], global_target_tokens=100)
    time.sleep(0.3)  # a collective of the other may still be ending
    os.kill(os.getpid(), signal.SIGKILL)


def go_on(world: World, folder: str) -> dict[str, Any]:
    """The same from what was saved. Runs in every rank."""
    found: dict[str, Any] = {}
    for name, stage in CASES:
        config, store = run_config(name, stage), open_store(f"{folder}/{name}-{stage}")
        engine = Engine(_model(config, seed=99), config, world, torch.device("cpu"))
        restored = restore(store, engine, world)
        assert restored is not None
        losses = train(engine, config, world, range(SAVED, STEPS))
        found[f"{name} {stage}"] = {"losses": losses, "state": _digest(engine)}
        engine.close()
    return found


def _model(config: RunConfig, seed: int = 3) -> torch.nn.Module:
    return build_model(config.model, config.loss, seed=seed)


def _digest(engine: Engine) -> list[str]:
    """Of every tensor that this rank would save."""
    return sorted(
        f"{fragment.name} {key} {fragment.start} {hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()}"
        for fragment in engine.fragments()
        for key, tensor in fragment.tensors.items()
    )


@functools.cache
def plain_losses(name: str) -> list[float]:
    """One process, whole batch, torch's own clipping and AdamW."""
    config = run_config(name, 0)
    model = _model(config)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=RATE, betas=(0.9, 0.95), eps=1e-8, foreach=False,
    )  # fmt: skip
    losses = []
    for step in range(STEPS):
        batches = batches_of(config, step)
        targets = sum(int((batch.labels != IGNORED_LABEL).sum()) for batch in batches)
        sums = [model(batch) for batch in batches]
        optimizer.zero_grad()
        (sum(s.objective for s in sums) / targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(sum(s.nll for s in sums)) / targets)
    return losses


def test_every_registered_family_has_a_small_config() -> None:
    assert set(ONE_EACH) == set(family_names())


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Of both ranks, untouched and gone on; the processes start once for all families and stages."""
    folder = tmp_path_factory.mktemp("stages")
    arguments = {"folder": str(folder)}
    killed = run_ranks(train_and_be_killed, ranks=2, arguments=arguments, timeout_s=900, check=False)
    assert [rank.returncode for rank in killed] == [-signal.SIGKILL] * 2, killed[0].output + killed[1].output
    others = run_ranks(go_on, ranks=2, arguments=arguments, timeout_s=900)
    return [(json.loads((folder / f"untouched-{rank.rank}.json").read_text()), rank.value) for rank in others]


@pytest.mark.timeout(2000)  # the first one waits for the ranks: a minute, many on a machine that others load
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("family", ONE_EACH)
def test_a_family_trains_as_a_plain_loop_and_goes_on_bit_for_bit_after_a_kill(
    family: str, stage: int, results: list[tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    name = ONE_EACH[family]
    for untouched, gone_on in results:
        found, again = untouched[f"{name} {stage}"], gone_on[f"{name} {stage}"]
        assert len(found["state"]) > 0
        assert again["state"] == found["state"]
        assert again["losses"] == found["losses"][SAVED:]
        assert found["losses"] == pytest.approx(plain_losses(name), rel=1e-5)
        assert found["losses"][-1] != found["losses"][0]
