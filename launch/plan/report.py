"""`pretrain plan CONFIG --gpus 64xH100`: memory, time, cost and goodput before anything is started.

Takes a config → tables or JSON. A run that does not fit is an error that names the layout that does, or says what
would have to change; nothing is looked up, nothing is measured, no data are read.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from launch.plan.goodput import MTBF_PER_GPU_S, Goodput, goodput, save_stall_s
from launch.plan.machines import Accelerator, parse_gpus
from launch.plan.suggest import Layout, best_layout, layout_of
from launch.tables import format_table
from pretrain.config import RunConfig, load_config
from pretrain.config.batches import at_largest
from pretrain.errors import ExitCode, UserError
from pretrain.metrics.progress import format_count
from pretrain.model.flops import parameter_counts

HOUR_S = 3600.0


def run_plan(args: argparse.Namespace) -> int:
    """Handler of `pretrain plan`."""
    config = at_largest(load_config(args.config, args.overrides, check_files=False))
    ranks, machine = _machines(config, args.gpus)
    config = _on_gpus(config, ranks)
    layout = layout_of(config, ranks, machine)
    best = best_layout(config, ranks, machine)
    losses = goodput_of(layout, ranks, args.mtbf_hours)
    price = machine.price_per_hour if args.price is None else args.price
    fits = layout.memory.total_bytes <= machine.memory_bytes
    if args.json:
        print(json.dumps(as_json(layout, best, losses, ranks, machine, price), indent=2))
    else:
        print(as_text(layout, best, losses, ranks, machine, price))
    if not fits:
        raise UserError(refusal(layout, best, ranks, machine))
    return int(ExitCode.DONE)


def goodput_of(layout: Layout, ranks: int, mtbf_hours: float | None) -> Goodput:
    """Progress with the config's own interval between checkpoints."""
    per_gpu = MTBF_PER_GPU_S if mtbf_hours is None else mtbf_hours * HOUR_S
    checkpoint, step = layout.config.checkpoint, layout.speed.step_s
    interval = step * (checkpoint.ram_every_steps or checkpoint.every_steps)
    if checkpoint.every_minutes is not None:
        interval = min(interval, 60.0 * checkpoint.every_minutes)
    stall = save_stall_s(parameter_counts(layout.config.model).total, ranks)
    return goodput(ranks=ranks, interval_s=interval, save_stall_s=stall, mtbf_per_gpu_s=per_gpu)


def refusal(layout: Layout, best: Layout | None, ranks: int, machine: Accelerator) -> str:
    """What is wrong with a run that does not fit, and what to change."""
    needed, there = layout.memory.total_bytes, machine.memory_bytes
    text = (
        f"--gpus={ranks}x{machine.name} cannot hold the run: a rank needs {needed / 1e9:.1f} GB and has "
        f"{there / 1e9:.1f} GB (worst moment: {layout.memory.moment}). "
    )
    if best is not None:
        return text + f"This layout fits: {' '.join(best.changes(layout.config))}."
    least = layout_of(_smallest(layout.config), ranks, machine)
    state = least.memory.weights + least.memory.optimizer
    if state > there:
        more = -(-state * ranks // int(0.8 * there))
        return text + f"No layout fits: weights and optimizer alone are {state / 1e9:.1f} GB. Use {more} GPUs."
    return text + (
        f"No layout fits: the least is {least.memory.total_bytes / 1e9:.1f} GB at ZeRO-3 with one row, recomputed. "
        "Set a shorter batch.sequence_length, a smaller loss.chunk_rows, or use larger GPUs."
    )


def as_json(
    layout: Layout, best: Layout | None, losses: Goodput, ranks: int, machine: Accelerator, price: float
) -> dict[str, Any]:
    """All numbers of a plan."""
    cost = layout.speed.gpu_hours * price / max(losses.fraction, 1e-9)
    return {
        "gpus": ranks,
        "accelerator": machine.name,
        "parameters": parameter_counts(layout.config.model).total,
        "memory": layout.memory.to_json(),
        "memory_limit_bytes": machine.memory_bytes,
        "fits": layout.memory.total_bytes <= machine.memory_bytes,
        "speed": layout.speed.to_json(),
        "goodput": losses.to_json(),
        "price_per_gpu_hour": price,
        "cost": cost,
        "suggestion": None if best is None else best.changes(layout.config),
        "suggested_step_s": None if best is None else best.speed.step_s,
        "suggested_memory_bytes": None if best is None else best.memory.total_bytes,
    }


def as_text(
    layout: Layout, best: Layout | None, losses: Goodput, ranks: int, machine: Accelerator, price: float
) -> str:
    """The plan for a person."""
    config, speed, memory = layout.config, layout.speed, layout.memory
    engine, batch = config.engine, config.batch
    counts = parameter_counts(config.model)
    rounds = -(-batch.global_batch_size // batch.micro_batch_size // ranks)
    rows: list[tuple[str, float]] = [(name, size / 1e9) for name, size in memory.parts()]
    rows += [("total", memory.total_bytes / 1e9), ("there is", machine.memory_bytes / 1e9)]
    recomputed = ", recomputed activations" if engine.activation_checkpointing else ""
    cost = speed.gpu_hours * price / max(losses.fraction, 1e-9)
    days = speed.run_days / max(losses.fraction, 1e-9)
    lines = [
        f"{config.name}: {counts.total:,} parameters on {ranks} x {machine.name}, ZeRO-{engine.zero_stage}, "
        f"{engine.precision}{recomputed}",
        f"{batch.global_batch_size} rows a step = {rounds} rounds of {batch.micro_batch_size} on each rank",
        "",
        format_table([f"memory of a rank ({memory.moment})", "GB"], rows),
        "",
        f"step         {speed.step_s:.3g} s ({speed.compute_s:.3g} computing, {speed.exposed_communication_s:.2g} "
        f"waiting for others, {100 * speed.idle_fraction:.0f} % of the rounds empty)",
        f"speed        {format_count(speed.tokens_per_day)} tokens a day, {speed.tokens_per_second_per_gpu:,.0f} a "
        f"second and GPU, MFU {100 * speed.mfu:.0f} % (assumed: {100 * machine.matmul_fraction:.0f} % of the peak in "
        f"matrix products, {100 * machine.attention_fraction:.0f} % in attention)",
        f"failures     {losses.failures_per_day:.2g} a day; goodput {100 * losses.fraction:.1f} % with a checkpoint "
        f"every {losses.interval_s:.0f} s, at best {100 * losses.best_fraction:.1f} % "
        f"every {losses.best_interval_s:.0f} s",
        f"whole run    {days:.3g} days, {speed.gpu_hours / max(losses.fraction, 1e-9):,.0f} GPU hours, "
        f"${cost:,.0f} at ${price:g} an hour",
    ]
    if machine.estimated:
        lines.append(f"note         the rates of {machine.name} are scaled from a relative, not fitted to measurements")
    if best is not None and best.changes(config) and best.speed.step_s < 0.99 * speed.step_s:
        gain = speed.step_s / best.speed.step_s
        lines.append(f"faster       {gain:.2f}x with {' '.join(best.changes(config))}")
    return "\n".join(lines)


def _machines(config: RunConfig, text: str | None) -> tuple[int, Accelerator]:
    nodes = config.cluster.nodes
    if text is None and nodes is not None and nodes.accelerator is not None:
        text = f"{config.cluster.num_ranks}x{nodes.accelerator}"
    if text is None:
        raise UserError(
            "--gpus is missing, and the config names no GPU. A plan is for a machine. "
            "Write --gpus 64xH100, or set cluster.nodes.accelerator."
        )
    return parse_gpus(text)


def _on_gpus(config: RunConfig, ranks: int) -> RunConfig:
    cluster = config.cluster.model_copy(update={"device": "cuda", "num_ranks": ranks, "min_ranks": None})
    return config.model_copy(update={"cluster": cluster})


def _smallest(config: RunConfig) -> RunConfig:
    engine = config.engine.model_copy(update={"zero_stage": 3, "activation_checkpointing": True})
    batch = config.batch.model_copy(update={"micro_batch_size": 1})
    return config.model_copy(update={"engine": engine, "batch": batch})
