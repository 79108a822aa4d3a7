"""A tiny run for tests that need ranks: its config, its micro-batches, its loop and a plain PyTorch reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pretrain.config.schema import RunConfig
from pretrain.engine.distributed import all_reduce_sums
from pretrain.engine.engine import Engine
from pretrain.model.registry import build_model
from pretrain.optim.groups import parameter_groups
from pretrain.optim.schedules import learning_rate_at
from pretrain.sequence import IGNORED_LABEL, Batch, SeqInfo
from pretrain.topology import World

VOCABULARY = 67
TOKENS = 24  # per micro-batch
MICRO_BATCHES = 4  # J of a step
DEVICE = torch.device("cpu")


def run_config(
    zero_stage: int,
    precision: str = "fp32",
    *,
    optimizer: dict[str, Any] | None = None,
    dropout: float = 0.0,
    num_layers: int = 2,
    **engine: Any,
) -> RunConfig:
    chosen = {"kind": "adamw", "learning_rate": 0.01, "gradient_clipping": 0.5} if optimizer is None else optimizer
    return RunConfig.model_validate(
        {
            "name": "tiny",
            "seed": 5,
            "tokenizer": "none",
            "data": {"sources": {"none": {"path": "none"}}},
            "model": {
                "family": "decoder", "vocabulary_size": VOCABULARY, "width": 16, "num_heads": 2,
                "feed_forward_width": 24, "num_layers": num_layers, "dropout": dropout, "init_std": 0.2,
            },
            "batch": {"global_batch_size": MICRO_BATCHES, "micro_batch_size": 1, "sequence_length": TOKENS},
            "optimizer": chosen,
            "schedule": {"kind": "cosine", "total_steps": 20, "warmup_steps": 2},
            "engine": {
                "zero_stage": zero_stage, "precision": precision, "reduce_bucket_elements": 1000,
                "allgather_bucket_elements": 1000, "persistence_threshold_elements": 100, **engine,
            },
            "checkpoint": {"every_steps": 3},
        }
    )  # fmt: skip


def micro_batch(step: int, j: int) -> Batch:
    """Micro-batch j of a step: two to four documents, the last one padding, another number of targets each time."""
    generator = torch.Generator().manual_seed(1000 * step + j)
    ids = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    lengths = [[9, 11, 4], [20, 4], [5, 6, 8, 5], [3, 21]][j % 4]
    labels = torch.roll(ids, -1)
    ends = torch.tensor(lengths).cumsum(0)
    labels[ends - 1] = IGNORED_LABEL
    labels[ends[-2] :] = IGNORED_LABEL
    key = 7919 * step + 31 * j + 1
    return _batch(j, ids, lengths, labels, key)


def empty_batch() -> Batch:
    return _batch(-1, torch.zeros(TOKENS, dtype=torch.int64), [TOKENS], torch.full((TOKENS,), IGNORED_LABEL), 0)


def _batch(j: int, ids: torch.Tensor, lengths: list[int], labels: torch.Tensor, key: int) -> Batch:
    targets = int((labels != IGNORED_LABEL).sum())
    return Batch(j, ids, SeqInfo.from_lengths(lengths), labels, None, None, key, targets, 0, 0)


def make_engine(config: RunConfig, world: World, seed: int | None = None) -> Engine:
    model = build_model(config.model, config.loss, seed=config.seed if seed is None else seed)
    return Engine(model, config, world, DEVICE)


def train(engine: Engine, config: RunConfig, world: World, first: int, last: int) -> list[list[float]]:
    """[loss, gradient norm] of steps first <= step < last."""
    history = []
    for step in range(first, last):
        batches = [micro_batch(step, j) for j in range(MICRO_BATCHES)]
        targets = sum(batch.target_tokens for batch in batches)
        mine = batches[world.rank :: world.size]
        mine += [empty_batch()] * (engine.accumulation_steps - len(mine))
        nll = sum(float(engine.micro_step(batch, global_target_tokens=targets).nll) for batch in mine)
        outcome = engine.step(learning_rate_at(step, config.optimizer.learning_rate, config.schedule))
        assert outcome.applied
        history.append([all_reduce_sums([float(nll)])[0] / targets, outcome.gradient_norm])
    return history


def whole_masters(engine: Engine) -> dict[str, torch.Tensor]:
    """Whole fp32 masters by name, put together from all ranks' fragments."""
    masters = {name: torch.zeros(shape).view(-1) for name, shape in engine.shapes().items()}
    for fragment in engine.fragments():
        masters[fragment.name][fragment.start : fragment.start + fragment.length] = fragment.tensors["master"]
    for flat in masters.values():
        torch.distributed.all_reduce(flat)
    return {name: masters[name].view(shape) for name, shape in engine.shapes().items()}


def plain_loop(config: RunConfig, steps: int) -> tuple[list[list[float]], nn.Module]:
    """One process, whole batch, no DeepSpeed: mean over the step's targets, torch's clipping and optimizer."""
    model = build_model(config.model, config.loss, seed=config.seed)
    chosen: Any = config.optimizer
    groups = parameter_groups(model, chosen.weight_decay)
    for group in groups:
        group.pop("name")
    if chosen.kind == "adamw":
        optimizer: Any = torch.optim.AdamW(
            groups, lr=1.0, betas=(chosen.beta1, chosen.beta2), eps=chosen.eps, foreach=False
        )
    else:
        optimizer = torch.optim.SGD(groups, lr=1.0, momentum=chosen.momentum, foreach=False)
    history = []
    for step in range(steps):
        batches = [micro_batch(step, j) for j in range(MICRO_BATCHES)]
        targets = sum(int((batch.labels != IGNORED_LABEL).sum()) for batch in batches)
        loss = sum(model(batch).objective for batch in batches) / targets
        optimizer.zero_grad()
        loss.backward()
        limit = chosen.gradient_clipping or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, chosen.learning_rate, config.schedule)
        optimizer.step()
        history.append([float(loss.detach()), float(norm)])
    return history, model
