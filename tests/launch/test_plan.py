"""`pretrain plan`: against what autograd really keeps, against hand counts, simulation and brute force."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from launch import dry_run
from launch.plan.activations import stacks_of
from launch.plan.goodput import daly_interval, goodput, progress_fraction, young_interval
from launch.plan.machines import ACCELERATORS, parse_gpus
from launch.plan.memory import memory_per_rank
from launch.plan.speed import speed_of, split_flops
from launch.plan.suggest import best_layout, candidates, layout_of
from pretrain.config import RunConfig, config_from_dict
from pretrain.errors import UserError
from pretrain.model.flops import parameter_counts, training_flops_per_row
from pretrain.model.registry import build_model
from pretrain.sequence import Batch, SeqInfo
from tests.config.base import values
from tests.launch.runs import ROOT, run_cli

LLAMA = ROOT / "configs/llama-8b.yaml"
DECODER = {"family": "decoder", "vocabulary_size": 64, "width": 64, "num_heads": 4, "num_layers": 3}
MODELS: dict[str, dict[str, Any]] = {
    "decoder": {**DECODER, "feed_forward_width": 160, "num_kv_heads": 2},
    "decoder with norms and dropout": {**DECODER, "feed_forward_width": 160, "qk_norm": True, "dropout": 0.1},
    "moe": {**DECODER, "family": "moe", "feed_forward_width": 80, "num_experts": 4, "num_kv_heads": 2},
    "gpt2": {**DECODER, "family": "gpt2", "feed_forward_width": 256, "max_length": 64},
    "encoder": {**DECODER, "family": "encoder", "feed_forward_width": 256, "max_length": 64},
    "encoder_decoder": {
        "family": "encoder_decoder", "vocabulary_size": 64, "width": 64, "num_heads": 4, "feed_forward_width": 256,
        "num_encoder_layers": 2, "num_decoder_layers": 3,
    },
    "t5": {
        "family": "t5", "vocabulary_size": 64, "width": 64, "num_heads": 4, "feed_forward_width": 160,
        "num_encoder_layers": 2, "num_decoder_layers": 3,
    },
}  # fmt: skip


def config_of(model: dict[str, Any], **changes: Any) -> RunConfig:
    content = {**values(), "model": model}
    pairs = model["family"] in ("encoder_decoder", "t5")
    content["objective"] = {
        "kind": "seq2seq" if pairs else "masked_lm" if model["family"] == "encoder" else "causal_lm"
    }
    content["batch"] = {"global_batch_size": 16, "micro_batch_size": 4, "sequence_length": 64}
    if pairs:
        content["batch"]["source_length"] = 96
    content |= changes
    return config_from_dict(content)


def kept_by_autograd(config: RunConfig) -> int:
    """Bytes of everything that a forward pass up to the last layer saves for its backward pass, each storage once."""
    torch.manual_seed(0)
    model = build_model(
        config.model, config.loss, seed=1, activation_checkpointing=config.engine.activation_checkpointing
    )
    model.train()
    batch = config.batch
    rows, length, source = batch.micro_batch_size, batch.sequence_length, batch.source_length
    ids = torch.randint(64, (rows * length,))
    info = SeqInfo.from_lengths([length] * rows)
    sources = None if source is None else torch.randint(64, (rows * source,))
    layout = None if source is None else SeqInfo.from_lengths([source] * rows)
    whole = Batch(0, ids, info, ids, sources, layout, 5, ids.numel(), ids.numel(), 0)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, int] = {}
    alive: list[torch.Tensor] = []  # so that no address is given twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.dtype != torch.int64:
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.hidden(whole)
    return sum(found.values())


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_activations_are_what_autograd_keeps(name: str, recomputed: bool) -> None:
    engine = {"precision": "fp32", "activation_checkpointing": recomputed}
    config = config_of(MODELS[name], engine=engine)
    planned = sum(s.kept_bytes(4, recomputed=recomputed) for s in stacks_of(config.model, config.batch))
    measured = kept_by_autograd(config)
    # Beside the layers stand the embedding, the last norm, the angles of the positions, the encoder's transform.
    tokens = 4 * (64 + (config.batch.source_length or 0))
    slack = tokens * 64 * 4 * (5 if config.batch.source_length or config.model.family == "encoder" else 3)
    assert planned == pytest.approx(measured, abs=slack), (planned / measured, (planned - measured) / (tokens * 64 * 4))


def test_a_rank_holds_its_part_of_shared_experts() -> None:
    batch = {**values()["batch"], "global_batch_size": 16}
    weights = {}
    for sharing in (1, 4):
        engine = {"zero_stage": 1, "precision": "bf16", "expert_parallel_size": sharing}
        weights[sharing] = memory_per_rank(config_of(MODELS["moe"], engine=engine, batch=batch), 8).weights
    experts = 3 * 4 * 3 * 64 * 80  # layers x experts x matrices of one
    assert weights[1] - weights[4] == 2 * experts * 3 // 4


@pytest.mark.parametrize(
    ("stage", "precision", "ranks", "bytes_per_parameter"),
    [
        (0, "fp32", 4, 4 + 8),  # weights are their own masters
        (0, "bf16", 4, 2 + 4 + 8),
        (1, "bf16", 4, 2 + 12 / 4),
        (2, "bf16", 8, 2 + 12 / 8),
        (3, "bf16", 8, (2 + 12) / 8),
        (3, "fp32", 2, (4 + 12) / 2),
    ],
)
def test_weights_and_optimizer_are_counted_as_zero_shards_them(
    stage: int, precision: str, ranks: int, bytes_per_parameter: float
) -> None:
    engine = {"zero_stage": stage, "precision": precision, "allgather_bucket_elements": 1, "reduce_bucket_elements": 1}
    config = config_of(MODELS["decoder"], engine=engine, batch={**values()["batch"], "global_batch_size": 16})
    memory = memory_per_rank(config, ranks)
    count = parameter_counts(config.model).total
    state = memory.weights + memory.optimizer
    slack = 4 * (count // 3 + 64 * 64) if stage == 3 else 64 * ranks  # a gathered layer
    assert state == pytest.approx(bytes_per_parameter * count, abs=slack)


def test_memory_falls_with_the_stage_and_grows_with_rows_and_ranks_only_help() -> None:
    base = {**DECODER, "width": 512, "feed_forward_width": 1408, "vocabulary_size": 4096, "num_layers": 8}

    def total(stage: int, ranks: int, **changes: Any) -> int:
        engine = {"zero_stage": stage, "reduce_bucket_elements": 100_000, "allgather_bucket_elements": 100_000}
        return memory_per_rank(config_of(base, engine={**engine, **changes}), ranks).total_bytes

    assert total(0, 8) > total(1, 8) >= total(2, 8) > total(3, 8)
    assert all(total(stage, 4) >= total(stage, 8) for stage in (0, 1, 2, 3))
    assert total(2, 8, activation_checkpointing=True) < total(2, 8)


def test_speed_is_the_flops_over_the_rates_when_nothing_else_counts() -> None:
    config = config_of(MODELS["decoder"])
    matrices, attention = split_flops(config.model, config.batch)
    assert 3 * (matrices + attention) == pytest.approx(training_flops_per_row(config.model, config.batch))
    head, width = 16, 64  # by hand: causal, queries and keys of 64 tokens
    assert attention == pytest.approx(3 * 2 * (4 * head) * 64 * 64)
    layer = width * (4 * head + 2 * 2 * head) + 4 * head * width + 3 * width * 160
    assert matrices == pytest.approx(2 * 64 * (3 * layer + 64 * width))
    machine = ACCELERATORS["H100"]
    speed = speed_of(config, 1, machine)
    seconds = 16 * (3 * matrices / machine.matmul_fraction + 3.5 * attention / machine.attention_fraction)
    seconds = seconds / machine.peak_flops + 16 * 3 * 3 * 64 * 64 * machine.element_s
    assert speed.step_s == pytest.approx(seconds)
    assert speed.exposed_communication_s == 0.0
    assert speed.tokens_per_day == pytest.approx(16 * 64 / seconds * 86400)


def test_empty_micro_batches_of_the_last_round_cost_time() -> None:
    config = config_of(MODELS["decoder"])  # four micro-batches
    three, four = speed_of(config, 3, ACCELERATORS["H100"]), speed_of(config, 4, ACCELERATORS["H100"])
    assert three.idle_fraction == pytest.approx(2 / 6)
    assert four.idle_fraction == 0.0
    assert three.compute_s == pytest.approx(2 * four.compute_s)


def test_goodput_is_that_of_a_simulation() -> None:
    """Failures at random moments, work since the last save lost, a restart after each."""
    rng = random.Random(3)
    mtbf, interval, stall, restart = 3000.0, 400.0, 20.0, 60.0
    done, clock, next_failure = 0.0, 0.0, rng.expovariate(1 / mtbf)
    while done < 4e6:
        end = clock + interval + stall
        if end <= next_failure:
            clock, done = end, done + interval
            continue
        clock = next_failure  # the segment is lost; failures during the restart start it again
        while True:
            next_failure = clock + rng.expovariate(1 / mtbf)
            if next_failure > clock + restart:
                break
            clock = next_failure
        clock += restart
    assert progress_fraction(interval, stall, mtbf, restart) == pytest.approx(done / clock, rel=0.01)


@pytest.mark.parametrize(("stall", "mtbf"), [(1.0, 10_000.0), (30.0, 3600.0), (120.0, 1800.0)])
def test_the_best_interval_is_the_best_of_all(stall: float, mtbf: float) -> None:
    best = max((progress_fraction(t, stall, mtbf, 60.0), t) for t in range(5, 5000, 5))
    ours = progress_fraction(daly_interval(stall, mtbf), stall, mtbf, 60.0)
    assert ours == pytest.approx(best[0], rel=1e-3)
    assert young_interval(stall, mtbf) == pytest.approx(math.sqrt(2 * stall * mtbf))


def test_a_machine_that_never_gets_through_makes_no_progress_and_no_error() -> None:
    assert goodput(ranks=10**6, interval_s=1e6, save_stall_s=1.0).fraction < 1e-6


@pytest.mark.parametrize(
    ("text", "count", "name"), [("64xH100", 64, "H100"), ("8 x a100", 8, "A100-80GB"), ("1xB200", 1, "B200")]
)
def test_gpus_are_read(text: str, count: int, name: str) -> None:
    number, machine = parse_gpus(text)
    assert (number, machine.name) == (count, name)


@pytest.mark.parametrize("text", ["H100", "0xH100", "8xTPU", "8*H100", "-1xH100", ""])
def test_other_gpus_are_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(UserError, match="known are H100"):
        parse_gpus(text)


def test_the_plan_as_json_adds_up(tmp_path: Path) -> None:
    done = run_cli(tmp_path, "plan", str(LLAMA), "--gpus", "64xH100", "--json", "--price", "2")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    memory = plan["memory"]
    parts = [size for name, size in memory.items() if name not in ("moment", "total_bytes")]
    assert sum(parts) == memory["total_bytes"] <= plan["memory_limit_bytes"]
    assert plan["parameters"] == 8_030_261_248
    speed = plan["speed"]
    assert speed["tokens_per_step"] == 1024 * 4096
    hours = speed["step_s"] * 38200 / 3600 * 64
    assert speed["gpu_hours"] == pytest.approx(hours)
    assert plan["cost"] == pytest.approx(2 * hours / plan["goodput"]["fraction"])
    assert plan["goodput"]["mtbf_s"] == pytest.approx(16384 * 54 * 86400 / 419 / 64)


def test_a_run_that_does_not_fit_is_refused_and_the_layout_that_it_names_fits(tmp_path: Path) -> None:
    words = ["plan", str(LLAMA), "--gpus", "16xA100-40GB"]
    refused = run_cli(tmp_path, *words, "engine.zero_stage=0", "engine.activation_checkpointing=off")
    assert refused.returncode == 2
    assert "--gpus=16xA100-40GB cannot hold the run" in refused.stderr
    assert "memory of a rank" in refused.stdout
    changes = refused.stderr.split("This layout fits: ")[1].strip().rstrip(".").split()
    base = ["engine.zero_stage=0", "engine.activation_checkpointing=off"]
    kept = [word for word in base if word.split("=")[0] not in {change.split("=")[0] for change in changes}]
    again = run_cli(tmp_path, *words, *kept, *changes)
    assert again.returncode == 0, again.stderr


def test_a_run_that_no_layout_holds_says_how_many_gpus_would(tmp_path: Path) -> None:
    refused = run_cli(tmp_path, "plan", str(LLAMA), "--gpus", "1xA100-40GB")
    assert refused.returncode == 2
    assert "weights and optimizer alone are" in refused.stderr
    number = int(refused.stderr.split("Use ")[1].split()[0])
    assert run_cli(tmp_path, "plan", str(LLAMA), "--gpus", f"{number}xA100-40GB").returncode in (0, 2)
    engine = {"zero_stage": 3, "activation_checkpointing": True}
    smallest = config_of(MODELS["decoder"], engine=engine)
    assert best_layout(smallest, number, ACCELERATORS["A100-40GB"]) is not None


def test_the_suggestion_is_the_fastest_layout_that_fits() -> None:
    big = {**DECODER, "width": 4096, "num_heads": 32, "num_layers": 32, "feed_forward_width": 14336}
    config = config_of(big, batch={"global_batch_size": 256, "micro_batch_size": 8, "sequence_length": 4096})
    machine = ACCELERATORS["A100-80GB"]
    best = best_layout(config, 64, machine)
    assert best is not None
    assert best.memory.total_bytes <= machine.memory_bytes
    for candidate in candidates(config, 64):
        other = layout_of(candidate, 64, machine)
        if other.memory.total_bytes <= machine.memory_bytes:
            assert best.speed.step_s <= other.speed.step_s * 1.01
    assert best.config.batch.global_batch_size == 256


def test_without_gpus_the_config_says_which(tmp_path: Path) -> None:
    missing = run_cli(tmp_path, "plan", str(LLAMA))
    assert missing.returncode == 2
    assert "--gpus is missing" in missing.stderr
    nodes = ["cluster.nodes.ranks=8", "cluster.nodes.cpus=96", "cluster.nodes.memory=1TB"]
    named = run_cli(tmp_path, "plan", str(LLAMA), *nodes, "cluster.nodes.accelerator=H100")
    assert named.returncode == 0, named.stderr
    assert "on 64 x H100" in named.stdout


def test_a_dry_run_says_what_a_rank_needs_and_refuses_what_the_machine_does_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(MODELS["decoder"])
    needed = memory_per_rank(config, 1).total_bytes + dry_run.RANK_BYTES
    for there, fits in ((needed + 1, True), (needed - 1, False)):
        memory = dry_run.psutil.virtual_memory()._replace(available=there)
        monkeypatch.setattr(dry_run.psutil, "virtual_memory", lambda memory=memory: memory)
        if fits:
            assert f"{needed / 1e9:.1f} GB a rank" in dry_run._check_memory(config)
        else:
            with pytest.raises(UserError, match="ends by signal 9"):
                dry_run._check_memory(config)
