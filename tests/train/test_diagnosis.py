"""Traces of chosen steps and ranks, and what is said when memory runs out: by the real allocator."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pretrain.config.schema import ProfileConfig
from pretrain.errors import ExitCode
from pretrain.log import Log
from pretrain.store import open_store
from pretrain.train.out_of_memory import advice, is_out_of_memory
from pretrain.train.profiler import StepProfiler
from tests.metrics.home import run_config
from tests.ranks import run_ranks
from tests.tiny import build_tiny
from tests.train import rank_diagnosis

ROOT = Path(__file__).parents[2]


def test_chosen_steps_are_traced_and_an_empty_memory_is_explained(tmp_path: Path) -> None:
    tiny = build_tiny(tmp_path, documents=120)
    arguments = tiny.decoder("name=hungry", "metrics.profile.steps=[2]", "metrics.profile.ranks=[1]")
    results = run_ranks(
        rank_diagnosis.hungry,
        ranks=2,
        arguments={"arguments": arguments, "home": str(tmp_path), "step": 4},
        timeout_s=150,
        check=False,
    )
    assert results[1].value == ExitCode.FAILED
    output = results[1].output
    assert "out of memory in step 4, phase step:" in output
    assert "can't allocate memory" in output
    assert "Set engine.activation_checkpointing=true" in output
    assert "Set batch.micro_batch_size=1" in output
    snapshot = json.loads((tmp_path / "hungry/diagnosis/attempt-001-rank-00001-memory.json").read_text())
    assert (snapshot["rank"], snapshot["step"]) == (1, 4)
    assert snapshot["bytes"]["weights"] == 4 * 28_224  # the parameters of the tiny decoder in fp32
    assert snapshot["host_bytes"]["resident"] > 50e6
    assert snapshot["largest"][0]["bytes"] >= snapshot["largest"][1]["bytes"]
    (trace,) = (tmp_path / "hungry/profiles/attempt-001").iterdir()
    assert trace.name == "step-00000002-rank-00001.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"aten::mm", "aten::addmm"} & names
    assert any("Backward" in str(name) for name in names)


def test_the_time_that_tracing_takes_is_told_to_the_watchdog(tmp_path: Path) -> None:
    told: list[str] = []

    def beat(phase: str, *, collective: bool = False) -> None:
        told.append(phase)

    log = Log(stream=io.StringIO())
    profiler = StepProfiler(ProfileConfig(steps=(2,), ranks=(0,)), open_store(tmp_path), 1, 0, log, beat)
    with profiler.step(1):
        torch.ones(2) + 1
    assert told == []
    with profiler.step(2):
        assert told == ["record"]  # the tracer starts
        told.append("step")
    assert told == ["record", "step", "record"]  # the trace is written


def test_a_model_that_is_too_large_for_its_process_is_told_in_words(tmp_path: Path) -> None:
    """L02: a process of 9.2 GB of address space is to build 114 GB of weights."""
    width, heads, hidden, layers = 8192, 32, 32768, 30
    sizes = {"width": width, "num_heads": heads, "feed_forward_width": hidden, "num_layers": layers}
    words = build_tiny(tmp_path).decoder("name=huge", *(f"model.{name}={size}" for name, size in sizes.items()))
    limited = ["bash", "-c", 'ulimit -v 9000000 && exec "$@"', "limited", sys.executable, "-m", "pretrain", *words]
    environment = {**os.environ, "PRETRAIN_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(limited, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == ExitCode.FAILED, done.stderr
    key_values, norms = 2 * width * 2 * (width // heads), 2 * width + 2 * (width // heads)
    count = layers * (2 * width**2 + key_values + 3 * width * hidden + norms) + width + 300 * width
    error = done.stderr.splitlines()[-1]
    for part in ("out of memory while the model and its optimizer were built", "can't allocate memory",
                  f"The model has {count:,} parameters, 114 GB in fp32", "may have 9.22 GB of address space",
                  "pretrain plan CONFIG tells what fits."):  # fmt: skip
        assert part in error, error
    assert "Traceback" not in done.stderr


def test_the_advice_fits_what_held_the_memory() -> None:
    config = run_config()
    first = advice(config, {"weights": 10, "masters and optimizer state": 80, "other tensors": 5})[0]
    assert first == "Set engine.zero_stage=3, or train on more ranks."
    assert advice(config, {"weights": 1, "other tensors": 50})[0].startswith("Set engine.activation_checkpointing=true")
    nothing_left = config.model_copy(
        update={
            "engine": config.engine.model_copy(update={"zero_stage": 3, "activation_checkpointing": True}),
            "batch": config.batch.model_copy(update={"micro_batch_size": 1}),
        }
    )
    assert advice(nothing_left, {}) == ["pretrain plan CONFIG tells what fits."]


@pytest.mark.parametrize(
    ("error", "is_one"),
    [(MemoryError(), True), (RuntimeError("CUDA out of memory. Tried"), True), (RuntimeError("shape mismatch"), False)],
)
def test_only_errors_of_memory_are_explained(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one
