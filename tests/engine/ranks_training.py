"""What the rank processes of this folder's tests run; each returns JSON."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pretrain.engine import distributed
from pretrain.engine.engine import Engine
from pretrain.errors import PeerFailedError, PretrainError, UserError
from pretrain.loss.sums import LossSums
from pretrain.model.registry import build_model
from pretrain.sequence import Batch
from pretrain.topology import World
from tests.engine.small import DEVICE, empty_batch, make_engine, micro_batch, run_config, train, whole_masters

POISON = 99
STAGES = [(stage, precision) for stage in range(4) for precision in ("fp32", "bf16")]


def several(world: World, calls: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Results of several functions of this module by name: starting a rank costs more than what they do."""
    return {name: globals()[name](world, **arguments) for name, arguments in calls.items()}


def curves(world: World, cases: list[dict[str, Any]], steps: int) -> list[list[list[float]]]:
    """Loss and gradient norm of each step for several engines, one after the other."""
    results = []
    for case in cases:
        config = run_config(**case)
        engine = make_engine(config, world)
        results.append(train(engine, config, world, 0, steps))
        engine.close()
    return results


bf16_curves = curves


class Poisonable(nn.Module):
    """A model whose loss is infinite for the micro-batch with index POISON."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: Batch) -> LossSums:
        sums: LossSums = self.inner(batch)
        factor = math.inf if batch.index == POISON else 1.0
        return LossSums(sums.objective * factor, sums.nll, sums.z_loss)


def non_finite(world: World) -> dict[str, Any]:
    """A poisoned step between two good ones; only the last rank sees the poison."""
    results = {}
    for stage, precision in STAGES:
        config = run_config(stage, precision)
        model = Poisonable(build_model(config.model, config.loss, seed=config.seed))
        engine = Engine(model, config, world, DEVICE)
        outcomes, states = [], []
        for step in range(3):
            for j in range(engine.accumulation_steps):
                batch = micro_batch(step, j * world.size + world.rank)
                bad = step == 1 and j == 0 and world.rank == world.size - 1
                engine.micro_step(replace(batch, index=POISON) if bad else batch, global_target_tokens=60)
            outcomes.append(engine.step(0.01))
            states.append([{k: v.clone() for k, v in f.tensors.items()} for f in engine.fragments()])
        before, skipped, after = states
        results[f"{stage} {precision}"] = {
            "applied": [outcome.applied for outcome in outcomes],
            "norms": [str(outcome.gradient_norm) for outcome in outcomes],
            "unchanged": all(torch.equal(a[k], b[k]) for a, b in zip(before, skipped, strict=True) for k in a),
            "moves_on": any(not torch.equal(a[k], b[k]) for a, b in zip(skipped, after, strict=True) for k in a),
            "counter": engine.optimizer_scalars()["decay"]["step"],
            "finite": all(bool(torch.isfinite(v).all()) for f in after for v in f.values()),
        }
        engine.close()
    return results


def clipped_lengths(world: World) -> dict[str, list[float]]:
    """Length of one SGD step at rate 1 with clipping at 0.1, and the norm that was reported."""
    results = {}
    for stage, precision in STAGES:
        sgd = {"kind": "sgd", "learning_rate": 1.0, "gradient_clipping": 0.1}
        config = run_config(stage, precision, optimizer=sgd)
        engine = make_engine(config, world)
        before = whole_masters(engine)
        for j in range(engine.accumulation_steps):
            engine.micro_step(micro_batch(0, j * world.size + world.rank), global_target_tokens=4)
        outcome = engine.step(1.0)
        after = whole_masters(engine)
        length = math.sqrt(sum(float((after[n] - before[n]).double().pow(2).sum()) for n in after))
        results[f"{stage} {precision}"] = [length, outcome.gradient_norm]
        engine.close()
    return results


def no_targets(world: World) -> dict[str, Any]:
    """A step in which no label counts anywhere."""
    results = {}
    for stage, precision in STAGES:
        config = run_config(stage, precision, optimizer={"kind": "sgd", "learning_rate": 1.0})
        engine = make_engine(config, world)
        before = whole_masters(engine)
        sums = [engine.micro_step(empty_batch(), global_target_tokens=0) for _ in range(engine.accumulation_steps)]
        outcome = engine.step(1.0)
        after = whole_masters(engine)
        results[f"{stage} {precision}"] = {
            "loss": [float(value) for value in sums[0]],
            "norm": outcome.gradient_norm,
            "unchanged": all(torch.equal(before[name], after[name]) for name in before),
        }
        engine.close()
    return results


def rank_without_targets(world: World) -> dict[str, dict[str, Any]]:
    """A step whose targets are all on rank 0, against one where the same micro-batches are spread over two ranks."""
    first, second, empty = micro_batch(0, 0), micro_batch(0, 1), empty_batch()
    targets = first.target_tokens + second.target_tokens
    results = {}
    for stage in range(4):
        masters, outcomes, losses = [], [], []
        for shares in (((first, second), (empty, empty)), ((first, empty), (second, empty))):
            config = run_config(stage, optimizer={"kind": "sgd", "learning_rate": 1.0, "gradient_clipping": 0.5})
            engine = make_engine(config, world)
            sums = [engine.micro_step(batch, global_target_tokens=targets) for batch in shares[world.rank]]
            outcomes.append(engine.step(1.0))
            losses.append(distributed.all_reduce_sums([sum(float(s.nll) for s in sums)])[0] / targets)
            masters.append(whole_masters(engine))
            engine.close()
        results[str(stage)] = {
            "applied": [outcome.applied for outcome in outcomes],
            "norms": [outcome.gradient_norm for outcome in outcomes],
            "losses": losses,
            "apart": max(float((masters[0][name] - masters[1][name]).abs().max()) for name in masters[0]),
        }
    return results


def exact_start(world: World) -> dict[str, bool]:
    """Whether the masters are the model's fp32 values bit for bit, and the optimizer fresh."""
    results = {}
    for stage, precision in STAGES:
        config = run_config(stage, precision)
        wanted = dict(build_model(config.model, config.loss, seed=config.seed).named_parameters())
        engine = make_engine(config, world)
        masters = whole_masters(engine)
        fresh = not engine.optimizer_scalars() and set(engine.fragments()[0].tensors) == {"master"}
        results[f"{stage} {precision}"] = fresh and all(torch.equal(masters[n], p) for n, p in wanted.items())
        engine.close()
    return results


def evaluation(world: World) -> dict[str, bool]:
    """Whether a run that evaluates between and within steps equals one that never does, with dropout on."""
    results = {}
    for stage, precision in STAGES:
        config = run_config(stage, precision, dropout=0.2)
        runs = []
        for evaluates in (False, True):
            engine = make_engine(config, world)
            history = train(engine, config, world, 0, 2)
            losses = [float(engine.evaluate(micro_batch(9, 0)).nll) for _ in range(2)] if evaluates else [0.0, 0.0]
            history += train(engine, config, world, 2, 4)
            runs.append((history, whole_masters(engine), losses))
            engine.close()
        (plain, weights, _), (evaluated, same, losses) = runs
        equal = plain == evaluated and all(torch.equal(weights[name], same[name]) for name in weights)
        results[f"{stage} {precision}"] = equal and losses[0] == losses[1]
    return results


def gathered(world: World) -> dict[str, list[bool]]:
    """Whether the whole weights that the model computes with are at hand: shapes, and equal to the masters."""
    results = {}
    for stage, precision in STAGES:
        config = run_config(stage, precision)
        engine = make_engine(config, world)
        train(engine, config, world, 0, 1)
        masters = whole_masters(engine)
        with engine.gathered_weights() as weights:
            same = [torch.equal(weights[n].float(), m.to(weights[n].dtype).float()) for n, m in masters.items()]
        results[f"{stage} {precision}"] = same
        engine.close()
    return results


def collectives(world: World) -> dict[str, Any]:
    """Sums, texts, broadcasts and votes."""
    big = 2**62 - 1 - world.rank
    sums = distributed.all_reduce_sums([big, -5, 0.1 * (world.rank + 1), 1e300 if world.rank else -1e300])
    texts = distributed.gather_texts("ü" * world.rank)
    long_texts = distributed.gather_texts("ü" * (400 * world.rank) + ".")  # more than one message holds
    told = distributed.broadcast_bytes(b"from 0" if world.is_main else None).decode()
    distributed.vote(True, "unused")
    distributed.barrier()
    failed = ""
    try:
        distributed.vote(world.rank != 1, "no space", error=UserError)
    except UserError as error:
        failed = str(error)
    return {
        "sums": sums,
        "texts": texts,
        "long": long_texts,
        "told": told,
        "failed": failed,
        "infinite": _infinite_sum(world),
    }


def _infinite_sum(world: World) -> str:
    return str(distributed.all_reduce_sums([math.inf if world.is_main else -math.inf])[0])


def dying_peer(world: World) -> str:
    """The last rank is killed; the others learn it from their next collective."""
    if world.rank == world.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        distributed.barrier()
    except PeerFailedError as error:
        return str(error)
    return "nothing noticed"


def misuse(world: World) -> list[str]:
    """Errors of a wrong order of calls."""
    engine = make_engine(run_config(2), world)
    errors = []
    for calls in (0, engine.accumulation_steps + 1):
        try:
            for _ in range(calls):
                engine.micro_step(micro_batch(0, 0), global_target_tokens=9)
            engine.step(0.1)
        except (RuntimeError, PretrainError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    engine.close()
    return errors
