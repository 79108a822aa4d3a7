"""`pretrain train --dry-run`: everything that can be known before training starts; nothing is written.

Takes a checked config → opens its data, counts parameters and rows, looks at the run's name and at the
machine → a summary. What would fail at the start fails here with the same message.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import psutil

from launch.plan.memory import memory_per_rank
from pretrain.config import RunConfig
from pretrain.config.batches import at_largest
from pretrain.config.capacity import model_batch
from pretrain.data.loader import open_loader
from pretrain.data.segments import steps_by_segment
from pretrain.data.state import Segment
from pretrain.data.tokenizer import Tokenizer
from pretrain.data.validation import open_validation
from pretrain.errors import ExitCode, RunError, UserError
from pretrain.metrics.progress import format_count
from pretrain.model.flops import parameter_counts, training_flops_per_step
from pretrain.rundir import ResumeMode, home_url
from pretrain.store import open_store
from pretrain.topology import World

RANK_BYTES = 700_000_000  # of a rank's process before its model: interpreter, torch, DeepSpeed (measured)


def dry_run(config: RunConfig, *, resume: ResumeMode) -> int:
    """Prints what the run would be.

    Raises:
        UserError: what a start would be refused for.
    """
    _check_name(config, resume)
    _check_devices(config)
    tokenizer = Tokenizer.load(config.tokenizer)
    if tokenizer.vocabulary_size > config.model.vocabulary_size:
        raise UserError(
            f"model.vocabulary_size={config.model.vocabulary_size} is below the tokenizer's "
            f"{tokenizer.vocabulary_size}. Every id needs a row. Set model.vocabulary_size="
            f"{tokenizer.vocabulary_size} or more."
        )
    known: dict[str, Any] = {"tokenizer_sha256": tokenizer.sha256, "special_ids": tokenizer.special_ids}
    with contextlib.closing(open_loader(config, None, World(), **known)) as loader:
        sources = ", ".join(loader.source_names)
        shapes = steps_by_segment(loader.initial_state(), 0, config.schedule.total_steps)
    validation = ", ".join(open_validation(config, tokenizer.byte_lengths(), World(), **known)) or "none"
    counts = parameter_counts(config.model)
    print(f"run         {config.name} in {home_url()}")
    print(f"model       {config.model.family}, {counts.total:,} parameters ({counts.embedding:,} in the embedding)")
    print(f"data        {sources}; validation: {validation}")
    _print_length(config, shapes)
    print(f"ranks       {config.cluster.num_ranks} on {config.cluster.device}, ZeRO-{config.engine.zero_stage}")
    print(_check_memory(config))
    print("nothing was started or written")
    return int(ExitCode.DONE)


def _print_length(config: RunConfig, shapes: list[tuple[Segment, int]]) -> None:
    """A line for the steps of each batch and length, and one for the whole run."""
    total_tokens, total_flops, shown = 0, 0, None
    for segment, steps in shapes:
        named = {"global_batch_size": segment.global_batch_size, "sequence_length": segment.sequence_length}
        batch = config.batch.model_copy(update=named)
        tokens, flops = segment.slots_per_step, training_flops_per_step(config.model, model_batch(config, batch))
        total_tokens, total_flops = total_tokens + steps * tokens, total_flops + steps * flops
        line = f"step        {segment.global_batch_size} rows = {tokens:,} tokens, {flops:.3g} FLOP"
        if line != shown:
            print(line)
            shown = line
    steps = config.schedule.total_steps
    print(f"run length  {steps} steps = {format_count(total_tokens)} tokens, {total_flops:.3g} FLOP")


def _check_name(config: RunConfig, resume: ResumeMode) -> None:
    exists = open_store(home_url()).exists(f"{config.name}/run.yaml")
    if exists and resume == "never":
        raise RunError(
            f"name={config.name} exists already in {home_url()}. --resume=never only starts new runs. "
            f"Go on with pretrain resume {config.name} (or --resume auto), or choose another --name."
        )
    if not exists and resume == "must":
        raise RunError(
            f"name={config.name} does not exist in {home_url()}. --resume=must only goes on with a run that is there. "
            "Correct --name or PRETRAIN_HOME."
        )


def _check_memory(config: RunConfig) -> str:
    """A line on the memory of a rank; raises UserError when this machine does not have it."""
    ranks = config.cluster.num_ranks
    planned = memory_per_rank(at_largest(config), ranks)
    needed = planned.total_bytes
    if config.cluster.device == "cuda":
        import torch

        there = int(torch.cuda.get_device_properties(0).total_memory)
    else:
        needed += RANK_BYTES
        there = psutil.virtual_memory().available // ranks
    if needed > there:
        raise UserError(
            f"cluster.num_ranks={ranks} needs {needed / 1e9:.1f} GB a rank and there are {there / 1e9:.1f} GB "
            f"for each (worst moment: {planned.moment}). A rank that gets none ends by signal 9. Set a smaller "
            "batch.micro_batch_size, engine.activation_checkpointing=on or a higher engine.zero_stage."
        )
    return f"memory      {needed / 1e9:.1f} GB a rank of {there / 1e9:.1f} GB (worst moment: {planned.moment})"


def _check_devices(config: RunConfig) -> None:
    cluster = config.cluster
    if cluster.device == "cuda":
        import torch

        if torch.cuda.device_count() < cluster.num_ranks:
            raise UserError(
                f"cluster.num_ranks={cluster.num_ranks} needs as many CUDA devices and this machine has "
                f"{torch.cuda.device_count()}. A rank takes one. Lower it or set cluster.device=cpu."
            )
        return
    wanted, cores = cluster.num_ranks * cluster.threads_per_rank, os.cpu_count() or 1
    if wanted > cores:
        print(f"note: {cluster.num_ranks} ranks of {cluster.threads_per_rank} threads share {cores} cores")
