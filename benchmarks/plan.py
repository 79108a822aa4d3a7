"""`pretrain plan` against the truth: measured peak memory of small runs, and rows of published training reports.

Memory: the engine of a run, two ranks on this machine, two steps; the peak of the resident set above what was
resident before the model, against the planner's sum. Speed: tokens per second and GPU of published tables (see
`benchmarks.published`), predicted from shape, machine and layout alone.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import traceback
from dataclasses import dataclass
from typing import Any

from benchmarks.machine import NOTHING_KEPT, forget_peak, memory_kib
from benchmarks.published import ROWS, within
from benchmarks.result import Result
from pretrain.config import RunConfig, config_from_dict

LENGTH, RANKS = 512, 2
_SMALL = {
    "family": "decoder",
    "vocabulary_size": 8192,
    "width": 384,
    "num_heads": 6,
    "num_kv_heads": 3,
    "num_layers": 4,
}
_LARGE = {"family": "decoder", "vocabulary_size": 16384, "width": 640, "num_heads": 10, "num_layers": 8}
_GPT2 = {"family": "gpt2", "vocabulary_size": 8192, "width": 512, "num_heads": 8, "num_layers": 6, "max_length": LENGTH}
MODELS: dict[str, dict[str, Any]] = {
    "small": {**_SMALL, "feed_forward_width": 1024},
    "large": {**_LARGE, "feed_forward_width": 1728},
    "gpt2": {**_GPT2, "feed_forward_width": 2048},
}


@dataclass(frozen=True, slots=True)
class Case:
    """One small run: its model's name, ZeRO stage, precision, rows of a micro-batch, recomputation."""

    model: str
    zero_stage: int
    precision: str
    micro_batch_size: int = 2
    checkpointing: bool = False

    def config(self) -> RunConfig:
        return config_from_dict(
            {
                "name": "plan",
                "seed": 1,
                "tokenizer": "none",
                "data": {"sources": {"none": {"path": "none"}}},
                "model": MODELS[self.model],
                "batch": {
                    "global_batch_size": 2 * RANKS * self.micro_batch_size,
                    "micro_batch_size": self.micro_batch_size,
                    "sequence_length": LENGTH,
                },
                "optimizer": {"kind": "adamw", "learning_rate": 1e-3},
                "schedule": {"kind": "constant", "total_steps": 10},
                "engine": {
                    "zero_stage": self.zero_stage,
                    "precision": self.precision,
                    "activation_checkpointing": self.checkpointing,
                },
                "checkpoint": {"every_steps": 10},
                "cluster": {"num_ranks": RANKS},
            }
        )


CASES = [
    Case("small", 1, "bf16"),
    Case("large", 0, "fp32"),
    Case("large", 0, "bf16"),
    Case("large", 1, "bf16"),
    Case("large", 2, "bf16"),
    Case("large", 2, "fp32"),
    Case("large", 2, "bf16", 4, True),
    Case("large", 3, "bf16"),
    Case("large", 3, "fp32"),
    Case("large", 3, "bf16", 4, True),
    Case("gpt2", 2, "bf16"),
    Case("gpt2", 2, "fp32", 4, True),
]
QUICK = [CASES[0], CASES[10]]


def measure(*, quick: bool, command: str) -> list[Result]:
    """The largest relative error of memory over the cases, and the share of published rows that are met."""
    from launch.plan.memory import memory_per_rank

    errors = {}
    for case, peaks in measured_peaks(QUICK if quick else CASES):
        planned = memory_per_rank(case.config(), RANKS).total_bytes
        errors[case] = abs(planned / max(peaks) - 1.0)
        print(f"{case}: planned {planned / 1e6:.0f} MB, measured {max(peaks) / 1e6:.0f} MB", file=sys.stderr)
    met = sum(within(row, 0.15) for row in ROWS)
    runs = len(errors)
    return [
        Result("plan.memory_error_max", max(errors.values()), "fraction", "measured peak", None, runs, command),
        Result("plan.published_rows_within_15pct", met / len(ROWS), "fraction", "rows", len(ROWS), 1, command),
    ]


def measured_peaks(cases: list[Case]) -> list[tuple[Case, list[int]]]:
    """Peak bytes of every rank of each case, measured in processes of their own."""
    environment = {**os.environ, **NOTHING_KEPT, "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "benchmarks.plan", *(str(CASES.index(case)) for case in cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"a run failed:\n{done.stderr[-2000:]}")
    measured = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return [(case, [max(rank.values()) for rank in ranks]) for case, ranks in zip(cases, measured, strict=True)]


# ------------------------------------------------------------------------------------ in the process


def _peak_of(phase: Any) -> tuple[Any, int]:
    """What a phase gives, and the highest resident set while it ran."""
    forget_peak()
    value = phase()
    return value, 1024 * memory_kib("VmHWM")


def _run_rank(case: Case, rank: int, port: int) -> dict[str, int]:
    """Bytes above the start by phase: engine, then forward with backward, step, and what stays, of the second step."""
    import torch

    from benchmarks.step import batch_of
    from pretrain.engine.distributed import start_process_group
    from pretrain.engine.engine import Engine
    from pretrain.model.registry import build_model
    from pretrain.topology import World

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    config = case.config()
    world = World(rank, RANKS, rank, RANKS)
    start_process_group(world, torch.device("cpu"), 300.0)
    before = 1024 * memory_kib("VmRSS")

    def build() -> Engine:
        model = build_model(config.model, config.loss, seed=1, activation_checkpointing=case.checkpointing)
        return Engine(model, config, world, torch.device("cpu"))

    engine, built = _peak_of(build)
    generator = torch.Generator().manual_seed(rank)
    size = (case.micro_batch_size, LENGTH + 1)
    batches = [batch_of(j, torch.randint(8192, size, generator=generator)) for j in range(2)]
    tokens = sum(batch.target_tokens for batch in batches) * RANKS

    def accumulate() -> None:
        for batch in batches:
            engine.micro_step(batch, global_target_tokens=tokens)

    accumulate()
    engine.step(1e-3)
    _, training = _peak_of(accumulate)
    _, stepping = _peak_of(lambda: engine.step(1e-3))
    phases = {"build": built, "micro_steps": training, "step": stepping, "kept": 1024 * memory_kib("VmRSS")}
    return {name: value - before for name, value in phases.items()}


def _measure_here(case: Case) -> list[dict[str, int]]:
    """Forks the ranks from this process, which has imported everything once."""
    import deepspeed  # noqa: F401

    import pretrain.engine.engine
    import pretrain.model.registry  # noqa: F401

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    readers = []
    for rank in range(RANKS):
        reader, writer = os.pipe()
        if os.fork() == 0:
            code = 1
            try:
                os.dup2(2, 1)  # what libraries print is not the result
                os.write(writer, json.dumps(_run_rank(case, rank, port)).encode())
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writer)
        readers.append(reader)
    texts = [os.fdopen(reader).read() for reader in readers]
    for _ in readers:
        _, status = os.wait()
        if status:
            raise RuntimeError("a rank failed, its error is above")
    return [json.loads(text) for text in texts]


if __name__ == "__main__":
    for _number in sys.argv[1:]:
        print(json.dumps(_measure_here(CASES[int(_number)])), flush=True)
