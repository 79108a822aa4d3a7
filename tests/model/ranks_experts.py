"""A mixture of experts trained on ranks that share them, and the steps that it is trained on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from pretrain.checkpoint import save
from pretrain.config.schema import RunConfig
from pretrain.engine.distributed import all_reduce_sums
from pretrain.engine.engine import Engine
from pretrain.model.experts import Experts
from pretrain.model.moe import MoE
from pretrain.model.registry import build_model
from pretrain.sequence import IGNORED_LABEL, Batch, SeqInfo
from pretrain.store import open_store
from pretrain.topology import World
from tests.model.small import lm_batch, moe_config

MICRO_BATCHES, STEPS, RATE, CLIPPING = 7, 3, 0.5, 0.5  # seven: two ranks and four get an empty one each step


def run_config(stage: int, *, lopsided: bool) -> RunConfig:
    """SGD, because Adam would hide a wrong scale of the experts' gradients; lopsided, a token passes one expert."""
    chosen = 1 if lopsided else 2
    config = moe_config(dropout=0.1, balance_loss=0.05, router_z_loss=0.01, init_std=0.05, experts_per_token=chosen)
    return RunConfig.model_validate(
        {
            "name": "small", "seed": 3, "tokenizer": "none", "data": {"sources": {"none": {"path": "none"}}},
            "model": config.model_dump(),
            "batch": {"global_batch_size": MICRO_BATCHES, "micro_batch_size": 1, "sequence_length": 32},
            "optimizer": {"kind": "sgd", "learning_rate": RATE, "momentum": 0.9, "gradient_clipping": CLIPPING},
            "schedule": {"kind": "constant", "total_steps": STEPS}, "checkpoint": {"every_steps": STEPS},
            "engine": {"zero_stage": stage, "precision": "fp32", "expert_parallel_size": 2},
        }
    )  # fmt: skip


def build(config: RunConfig, *, lopsided: bool) -> MoE:
    """The initial weights; lopsided, every token chooses expert 0."""
    model = build_model(config.model, config.loss, seed=config.seed)
    assert isinstance(model, MoE)
    if lopsided:
        towards_D = torch.nn.functional.normalize(torch.ones(config.model.width), dim=0)
        with torch.no_grad():
            model.embedding.weight += towards_D
            for layer in model.layers:
                layer.mlp.router.weight[0] += towards_D
    return model


def batches_of(step: int) -> list[Batch]:
    """One of them has tokens and no targets, one only padding, one ends in padding; all of them are of other sizes."""
    batches = [lm_batch((5, 1 + j, 9 - j, 6), seed=10 * step + j) for j in range(MICRO_BATCHES)]
    batches[1] = replace(batches[1], labels=torch.full_like(batches[1].labels, IGNORED_LABEL), target_tokens=0)
    batches[2] = padding_only()
    labels = batches[5].labels.clone()
    labels[-6:] = IGNORED_LABEL
    tailed = replace(batches[5].decoder_info, padding=True)
    batches[5] = replace(batches[5], labels=labels, decoder_info=tailed, target_tokens=batches[5].target_tokens - 5)
    return batches


def padding_only() -> Batch:
    """What the loader fills the last round of a step with."""
    batch = lm_batch((21,))
    nothing = torch.full_like(batch.labels, IGNORED_LABEL)
    return replace(batch, labels=nothing, decoder_info=SeqInfo.from_lengths([21], padding=True), target_tokens=0)


def train_shared(world: World, folder: str, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    """By case: mean objective and gradient norm of each step, and the rows that each of this rank's experts got; the
    last weights are saved in `folder`."""
    return {name: _train(world, f"{folder}/{name}", **case) for name, case in cases.items()}


def _train(world: World, folder: str, *, stage: int, lopsided: bool) -> dict[str, list[Any]]:
    config = run_config(stage, lopsided=lopsided)
    engine = Engine(build(config, lopsided=lopsided), config, world, torch.device("cpu"))
    rows, compute = torch.zeros(config.model.num_experts // 2, dtype=torch.int64), Experts._compute

    def counting(self: Experts, x_ND: torch.Tensor, counts: list[int]) -> torch.Tensor:
        rows.add_(torch.tensor(counts))
        return compute(self, x_ND, counts)

    Experts._compute = counting  # type: ignore[method-assign]
    result: dict[str, list[Any]] = {"objectives": [], "norms": [], "rows": []}
    for step in range(STEPS):
        batches = batches_of(step)
        targets = sum(batch.target_tokens for batch in batches)
        mine = batches[world.rank :: world.size]
        mine += [padding_only()] * (engine.accumulation_steps - len(mine))
        rows.zero_()
        total = sum(float(engine.micro_step(batch, global_target_tokens=targets).objective) for batch in mine)
        outcome = engine.step(RATE)
        assert outcome.applied
        result["objectives"].append(all_reduce_sums([total])[0] / targets)
        result["norms"].append(outcome.gradient_norm)
        result["rows"].append(rows.tolist())
    Experts._compute = compute  # type: ignore[method-assign]
    store = open_store(folder)
    save(store, engine, step=STEPS, attempt=1, training_state={}, world=world, guard=lambda: None).wait()
    engine.close()
    return result
