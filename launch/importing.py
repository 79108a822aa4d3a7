"""`pretrain checkpoint import DIR CONFIG`: a Hugging Face model as the start of a run.

Takes config.json and safetensors → a new run whose step 0 is a checkpoint with those weights and a fresh
optimizer; `pretrain resume NAME` (or `train --resume auto`) trains it on, at any ZeRO stage and number of
ranks. Nothing is left of a run whose import fails. The weights are in memory once, in fp32.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from launch.train import config_of
from pretrain.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from torch import Tensor

    from pretrain.config import RunConfig
    from pretrain.config.schema import AnyModelConfig
    from pretrain.engine.state import Savable
    from pretrain.rundir import RunDirectory

# What a config.json says about training and not about the weights: the run's own config decides.
_DROPOUT = ("dropout", "attention_dropout")
_FREE = frozenset({*_DROPOUT, "attention", "kernels", "init_std", "balance_loss", "router_z_loss"})


def run_import(args: argparse.Namespace) -> int:
    """Handler of `pretrain checkpoint import`."""
    from pretrain.model.hf.directory import import_model, read_config
    from pretrain.rundir import RunDirectory

    config = config_of(args)
    theirs, weights = import_model(args.directory)
    check_same_model(config.model, theirs)
    training_state = _start_of(config)
    run, _ = RunDirectory.claim(config, resume="never")
    try:
        name = write_start(run, config, weights, training_state)
    except BaseException:
        run.store.delete_tree("")
        raise
    for note in dropout_notes(config.model, theirs, read_config(args.directory)):
        print(note)
    print(f"{args.directory} -> {name} of {run.name}; go on with: pretrain resume {run.name}")
    return ExitCode.DONE


def check_same_model(ours: AnyModelConfig, theirs: AnyModelConfig) -> None:
    """Raises ConfigError naming every field of the config that is not that of the imported model."""
    if ours.family != theirs.family:
        raise ConfigError(
            [
                f"model.family={ours.family} is not that of the imported model. Its weights are those of "
                f"model.family={theirs.family}. Set that."
            ]
        )
    differences = {
        name: (getattr(ours, name), value)
        for name, value in theirs
        if name not in _FREE and _resolved(ours, name) != _resolved(theirs, name)
    }
    if differences:
        raise ConfigError(
            [
                f"model.{name}={mine} is not that of the imported model. Weights and computation must stay what they "
                f"were. Set model.{name}={value if value is not None else 'null'}."
                for name, (mine, value) in differences.items()
            ]
        )


def dropout_notes(ours: AnyModelConfig, theirs: AnyModelConfig, body: Mapping[str, Any]) -> list[str]:
    """A line for each dropout that the imported model was trained with and this run will not have."""
    from pretrain.model.hf.directory import dropout_left_out

    differing = [name for name in _DROPOUT if getattr(ours, name) != getattr(theirs, name)]
    return [
        f"model.{name}={getattr(ours, name):g} as this config says; the imported one says {getattr(theirs, name):g}"
        for name in differing
    ] + [f"left out, because no model here has it: {what}" for what in dropout_left_out(body)]


def _resolved(model: AnyModelConfig, name: str) -> Any:
    """A field with its meaning where it is left out."""
    value = getattr(model, name)
    if value is None and name == "head_width":
        return model.width_per_head
    if value is None and name == "num_kv_heads":
        return model.num_heads
    return value


def _start_of(config: RunConfig) -> dict[str, Any]:
    """The training state before the first step. Raises what a run with this data and tokenizer would."""
    from pretrain.data.loader import open_loader
    from pretrain.data.tokenizer import Tokenizer
    from pretrain.topology import World
    from pretrain.train.state import TrainingState

    tokenizer = Tokenizer.load(config.tokenizer)
    loader = open_loader(config, None, World(), tokenizer_sha256=tokenizer.sha256)
    try:
        return TrainingState(step=0, data=loader.initial_state()).to_json()
    finally:
        loader.close()


def write_start(
    run: RunDirectory, config: RunConfig, weights: Mapping[str, Tensor], training_state: dict[str, Any]
) -> str:
    """Publishes the checkpoint of step 0, before any attempt; gives its name."""
    from pretrain.checkpoint import save
    from pretrain.rundir import Lease
    from pretrain.topology import World

    with Lease.acquire(run.store, purpose="pretrain checkpoint import") as lease:
        handle = save(
            run.checkpoints, _stateful(config, weights), step=0, attempt=0, training_state=training_state,
            world=World(), guard=lease.check, origin={"imported": True},
        )  # fmt: skip
        handle.wait()
    return handle.name


def _stateful(config: RunConfig, weights: Mapping[str, Tensor]) -> Savable:
    """Whole weights and an optimizer that has not stepped, as an engine would show them."""
    import torch

    from pretrain.engine.engine import group_of_each, optimizer_of
    from pretrain.engine.state import FreshState
    from pretrain.model.registry import build_model

    with torch.device("meta"):
        model = build_model(config.model, config.loss, seed=config.seed, initial=False)
    optimizer = optimizer_of(model, config.optimizer)
    return FreshState(weights, optimizer, group_of_each(model, optimizer, ()))
