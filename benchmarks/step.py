"""Training step: ours against a bare loop, against `transformers`' Trainer, and over two ranks against DDP.

One process with 2 threads, eager, gradients accumulated. Dense rows (one document each) of 512 tokens, so
that all sides compute the same; then rows of 2,048 packed with short documents, which ours keeps apart
and theirs does not (keeping them apart costs theirs a dense mask). Two ranks have one thread each.
Ours runs the whole step that training runs: keyed batches, loss sums, DeepSpeed, clipping, update. DeepSpeed's stage 3
puts a function of its own in the place of torch's `linear` for the whole process; every other side has torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.attention import documents
from benchmarks.bare_loop import BareLoop, Shape
from benchmarks.machine import precision
from benchmarks.ranks import run_in_ranks
from benchmarks.result import Result, clock, counts_cpu_time, interleave, median, median_ratio
from benchmarks.trainer_peer import TrainerPeer
from pretrain.config.schema import RunConfig
from pretrain.engine.distributed import start_process_group, stop_process_group
from pretrain.engine.engine import Engine
from pretrain.model.registry import build_model
from pretrain.sequence import Batch, SeqInfo
from pretrain.topology import World

ROWS, LENGTH, ACCUMULATION = 2, 512, 2
TOKENS_PER_STEP = ROWS * LENGTH * ACCUMULATION
PACKED_LENGTH = ROWS * LENGTH * ACCUMULATION  # one row holds the tokens of a dense step

PARTS = {
    "dense": "ours at three stages, a bare loop and the Trainer on one document a row",
    "packed": "ours and the Trainer on short documents",
    "ranks": "two ranks: ours at three stages and DDP",
}
TORCHS_LINEAR = F.linear

Step = Callable[[], float]


def run_config(
    shape: Shape, *, zero_stage: int, precision: str, rows: int = ROWS, length: int = LENGTH, microsteps: int
) -> RunConfig:
    """A config of the benchmark's size; its data section names nothing that exists."""
    return RunConfig.model_validate(
        {
            "name": "benchmark",
            "seed": 1,
            "tokenizer": "none",
            "data": {"sources": {"none": {"path": "none"}}},
            "model": {
                "family": "decoder",
                "vocabulary_size": shape.vocabulary_size,
                "width": shape.width,
                "num_layers": shape.num_layers,
                "num_heads": shape.num_heads,
                "num_kv_heads": shape.num_kv_heads,
                "feed_forward_width": shape.feed_forward_width,
                "tied_embeddings": shape.tied,
            },
            "batch": {
                "global_batch_size": rows * microsteps,
                "micro_batch_size": rows,
                "sequence_length": length,
            },
            "optimizer": {"kind": "adamw", "learning_rate": 1e-3},
            "schedule": {"kind": "constant", "total_steps": 1000},
            "engine": {"zero_stage": zero_stage, "precision": precision},
            "checkpoint": {"every_steps": 1000},
        }
    )


def build_engine(config: RunConfig, world: World | None = None) -> Engine:
    model = build_model(config.model, config.loss, seed=config.seed, activation_checkpointing=False)
    return Engine(model, config, world or World(), torch.device("cpu"))


def batch_of(index: int, ids: torch.Tensor, lengths: list[int] | None = None) -> Batch:
    """One micro-batch of [B, S+1] ids; without `lengths` each row is one document."""
    rows, length = ids.shape[0], ids.shape[1] - 1
    return Batch(
        index=index,
        decoder_ids=ids[:, :-1].reshape(-1),
        decoder_info=SeqInfo.from_lengths(lengths or [length] * rows),
        labels=ids[:, 1:].reshape(-1),
        encoder_ids=None,
        encoder_info=None,
        dropout_key=index,
        target_tokens=rows * length,
        target_bytes=rows * length,
        digest=0,
    )


def our_step(
    engine: Engine, microbatches: list[torch.Tensor], *, ranks: int = 1, lengths: list[int] | None = None
) -> Step:
    """Gives tokens/s of this rank for one step."""
    tokens = sum(ids[:, 1:].numel() for ids in microbatches)

    def step() -> float:
        start = clock()
        for index, ids in enumerate(microbatches):
            engine.micro_step(batch_of(index, ids, lengths), global_target_tokens=ranks * tokens)
        engine.step(1e-3)
        return tokens / (clock() - start)

    return step


def bare_step(loop: BareLoop, microbatches: list[torch.Tensor]) -> Step:
    pairs = [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in microbatches]
    tokens = sum(labels.numel() for _, labels in pairs)

    def step() -> float:
        start = clock()
        loop.step(pairs)
        return tokens / (clock() - start)

    return step


def with_torchs_linear(step: Step) -> Step:
    """The step as it is in a process without an engine of stage 3."""

    def measured() -> float:
        found, F.linear = F.linear, TORCHS_LINEAR
        try:
            return step()
        finally:
            F.linear = found

    return measured


def trainer_step(peer: TrainerPeer, tokens: int) -> Step:
    return lambda: tokens / peer.step()


def _random_ids(shape: Shape, rows: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(shape.vocabulary_size, (rows, length + 1), generator=generator)


def _dense(shape: Shape, kind: str, ids: torch.Tensor, peer: TrainerPeer, repetitions: int) -> dict[str, list[float]]:
    """tokens/s of ours at three stages, of the bare loop and of the Trainer on the same rows."""
    microbatches = list(ids.split(ROWS))
    engines = {
        f"zero{stage}": build_engine(run_config(shape, zero_stage=stage, precision=kind, microsteps=ACCUMULATION))
        for stage in (1, 2, 3)
    }
    sides: dict[str, Step] = {name: our_step(engine, microbatches) for name, engine in engines.items()}
    sides["bare"] = bare_step(BareLoop(shape, autocast=kind == "bf16"), microbatches)
    sides["trainer"] = trainer_step(peer, TOKENS_PER_STEP)
    sides = {name: step if name == "zero3" else with_torchs_linear(step) for name, step in sides.items()}
    interleave(sides, 1)
    values = interleave(sides, repetitions)
    for engine in engines.values():
        engine.close()
    return values


def _packed(shape: Shape, kind: str, ids: torch.Tensor, peer: TrainerPeer, repetitions: int) -> dict[str, list[float]]:
    """tokens/s on one row of short documents, isolated in ours, plainly causal in theirs."""
    config = run_config(shape, zero_stage=1, precision=kind, rows=1, length=PACKED_LENGTH, microsteps=1)
    engine = build_engine(config)
    sides = {
        "ours": our_step(engine, [ids], lengths=documents(PACKED_LENGTH)),
        "trainer": trainer_step(peer, PACKED_LENGTH),
    }
    interleave(sides, 1)
    values = interleave(sides, repetitions)
    engine.close()
    return values


def measure_ranks(world: World, *, repetitions: int, num_layers: int, precision: str) -> dict[str, list[float]]:
    """tokens/s of each rank: DDP and ours at three stages, in turn. Runs in every rank."""
    shape = Shape(num_layers=num_layers)
    microbatches = list(_random_ids(shape, ROWS * ACCUMULATION, LENGTH, seed=world.rank).split(ROWS))
    engines = {
        f"zero{stage}": build_engine(
            run_config(shape, zero_stage=stage, precision=precision, microsteps=ACCUMULATION * world.size), world
        )
        for stage in (1, 2, 3)
    }
    sides: dict[str, Step] = {
        name: our_step(engine, microbatches, ranks=world.size) for name, engine in engines.items()
    }
    sides["ddp"] = bare_step(BareLoop(shape, autocast=precision == "bf16", distributed=True), microbatches)
    sides = {name: step if name == "zero3" else with_torchs_linear(step) for name, step in sides.items()}
    interleave(sides, 1)
    values = interleave(sides, repetitions)
    for engine in engines.values():
        engine.close()
    return values


def measure(*, quick: bool, command: str) -> list[Result]:
    """Ratios of tokens/s, ours over the bare loop's, the Trainer's and DDP's."""
    # CPU time says nothing about ranks, which wait for each other.
    return _measure([part for part in PARTS if part != "ranks" or not counts_cpu_time()], quick, command)


def measure_part(part: str, *, quick: bool, command: str) -> list[Result]:
    """The metrics of one of `PARTS`."""
    return _measure([part], quick, command)


def _measure(parts: Sequence[str], quick: bool, command: str) -> list[Result]:
    repetitions, kind = (2 if quick else 5), precision()
    shape = Shape(num_layers=2) if quick else Shape()
    ids = {"dense": _random_ids(shape, ROWS * ACCUMULATION, LENGTH), "packed": _random_ids(shape, 1, PACKED_LENGTH)}
    results: list[Result] = []
    if here := [part for part in parts if part in ids]:
        # Before there is a process group, in which the Trainer would wrap its model for many ranks.
        peers = {
            part: TrainerPeer(
                shape, ids[part][:, 1:], rows=ROWS if part == "dense" else 1,
                accumulation=ACCUMULATION if part == "dense" else 1, bf16=kind == "bf16",
            )
            for part in here
        }  # fmt: skip
        start_process_group(World(), torch.device("cpu"), 60.0)
        try:
            for part in here:
                sides = _dense if part == "dense" else _packed
                values = sides(shape, kind, ids[part], peers[part], repetitions)
                results += _results(part, values, kind, repetitions, command)
        finally:
            stop_process_group()
            for peer in peers.values():
                peer.close()
    if "ranks" in parts:
        arguments: dict[str, Any] = {"repetitions": repetitions, "num_layers": shape.num_layers, "precision": kind}
        values = run_in_ranks("benchmarks.step:measure_ranks", 2, arguments, timeout_s=280)
        results += _results("ranks", values, kind, repetitions, command)
    return results


# Part -> metric -> (our side, theirs, who they are).
_METRICS = {
    "dense": {
        "vs_bare_loop": ("zero1", "bare", "bare loop"),
        "zero2_vs_bare_loop": ("zero2", "bare", "bare loop"),
        "zero3_vs_bare_loop": ("zero3", "bare", "bare loop"),
        "vs_best_peer": ("zero1", "trainer", "transformers' Trainer"),
    },
    "packed": {"packed_vs_best_peer": ("ours", "trainer", "transformers' Trainer")},
    "ranks": {
        "zero2_vs_ddp": ("zero2", "ddp", "DDP, per rank"),
        "zero3_vs_zero1": ("zero3", "zero1", "ours at ZeRO-1, per rank"),
    },
}


def _results(part: str, values: dict[str, list[float]], kind: str, repetitions: int, command: str) -> list[Result]:
    return [
        Result(
            f"step.{name}", median_ratio(values[ours], values[theirs]), "ratio",
            f"{baseline} in {kind}, tokens/s", median(values[theirs]), repetitions, command,
        )
        for name, (ours, theirs, baseline) in _METRICS[part].items()
    ]  # fmt: skip
