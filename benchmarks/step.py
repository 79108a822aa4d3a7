"""Training step: ours against a bare loop, in one process with 2 threads, bf16, accumulation 4, eager.

Dense rows (one document each) of 4 x 512 tokens, so that both sides compute the same. Ours runs the
whole step that training runs: keyed batches, loss sums, DeepSpeed's backward, clipping, update.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.bare_loop import BareLoop, Shape
from benchmarks.result import Result, interleave, median, median_ratio
from pretrain.config.schema import RunConfig
from pretrain.engine.distributed import start_process_group, stop_process_group
from pretrain.engine.engine import Engine
from pretrain.model.registry import build_model
from pretrain.sequence import Batch, SeqInfo
from pretrain.topology import World

ROWS, LENGTH, ACCUMULATION = 4, 512, 4
TOKENS_PER_STEP = ROWS * LENGTH * ACCUMULATION


def run_config(shape: Shape, *, zero_stage: int, precision: str = "bf16") -> RunConfig:
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
                "global_batch_size": ROWS * ACCUMULATION,
                "micro_batch_size": ROWS,
                "sequence_length": LENGTH,
            },
            "optimizer": {"kind": "adamw", "learning_rate": 1e-3},
            "schedule": {"kind": "constant", "total_steps": 1000},
            "engine": {"zero_stage": zero_stage, "precision": precision},
            "checkpoint": {"every_steps": 1000},
        }
    )


def build_engine(config: RunConfig) -> Engine:
    model = build_model(config.model, config.loss, seed=config.seed, activation_checkpointing=False)
    return Engine(model, config, World(), torch.device("cpu"))


def dense_batch(index: int, ids: torch.Tensor) -> Batch:
    """One micro-batch of [B, S+1] ids, each row one document."""
    rows, length = ids.shape[0], ids.shape[1] - 1
    return Batch(
        index=index,
        decoder_ids=ids[:, :-1].reshape(-1),
        decoder_info=SeqInfo.from_lengths([length] * rows),
        labels=ids[:, 1:].reshape(-1),
        encoder_ids=None,
        encoder_info=None,
        dropout_key=index,
        target_tokens=rows * length,
        target_bytes=rows * length,
        digest=0,
    )


def our_step(engine: Engine, microbatches: list[torch.Tensor]) -> Callable[[], float]:
    def step() -> float:
        start = time.perf_counter()
        for index, ids in enumerate(microbatches):
            engine.micro_step(dense_batch(index, ids), global_target_tokens=TOKENS_PER_STEP)
        engine.step(1e-3)
        return TOKENS_PER_STEP / (time.perf_counter() - start)

    return step


def bare_step(loop: BareLoop, microbatches: list[torch.Tensor]) -> Callable[[], float]:
    pairs = [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in microbatches]

    def step() -> float:
        start = time.perf_counter()
        loop.step(pairs)
        return TOKENS_PER_STEP / (time.perf_counter() - start)

    return step


def measure(*, quick: bool, command: str) -> list[Result]:
    """Ratios of tokens/s, ours over the bare loop's, for ZeRO 1, 2 and 3."""
    repetitions = 3 if quick else 9
    shape = Shape()
    generator = torch.Generator().manual_seed(0)
    microbatches = [
        torch.randint(shape.vocabulary_size, (ROWS, LENGTH + 1), generator=generator) for _ in range(ACCUMULATION)
    ]
    bare = bare_step(BareLoop(shape), microbatches)
    results = []
    start_process_group(World(), torch.device("cpu"), 60.0)
    try:
        for stage, metric in ((1, "step.vs_bare_loop"), (2, "step.zero2_vs_bare_loop"), (3, "step.zero3_vs_bare_loop")):
            engine = build_engine(run_config(shape, zero_stage=stage))
            ours = our_step(engine, microbatches)
            interleave({"ours": ours, "bare": bare}, 1)
            values = interleave({"ours": ours, "bare": bare}, repetitions)
            ratio = median_ratio(values["ours"], values["bare"])
            results.append(
                Result(metric, ratio, "ratio", "bare loop, tokens/s", median(values["bare"]), repetitions, command)
            )
            engine.close()
    finally:
        stop_process_group()
    return results
