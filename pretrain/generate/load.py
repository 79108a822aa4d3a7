"""A model for generation from its config and weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pretrain.config.schema import AnyModelConfig, LossConfig, RunConfig
from pretrain.errors import CheckpointError
from pretrain.model.registry import build_model


def load_model(config: RunConfig, weights: Mapping[str, Tensor], where: str) -> nn.Module:
    """`load_weights` for a run's config."""
    return load_weights(config.model, config.loss, weights, where, seed=config.seed)


def load_weights(
    config: AnyModelConfig, loss: LossConfig, weights: Mapping[str, Tensor], where: str, *, seed: int
) -> nn.Module:
    """The model in fp32 on the CPU, in evaluation mode, with exactly these weights.

    Args:
        weights: full tensors by parameter name, as `checkpoint.read_weights` gives them.
        where: they come from, for messages.

    Raises:
        CheckpointError: a parameter is missing, unknown, or of another shape.
    """
    # Every prompt has another length: compiled code would be made anew for each.
    eager = config.model_copy(update={"kernels": "eager"})
    model = build_model(eager, loss, seed=seed, activation_checkpointing=False)
    parameters = dict(model.named_parameters())
    missing, unknown = sorted(parameters.keys() - weights.keys()), sorted(weights.keys() - parameters.keys())
    misshapen = [
        f"{name} {tuple(weights[name].shape)} instead of {tuple(parameters[name].shape)}"
        for name in sorted(parameters.keys() & weights.keys())
        if weights[name].shape != parameters[name].shape
    ]
    problems = [
        f"{what}: {', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
        for what, names in (("missing", missing), ("unknown", unknown), ("wrong shape", misshapen))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{where} does not fit the model of run.yaml ({'; '.join(problems)}). Both must come from the same run. "
            "Use a checkpoint of this run."
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    return model.eval()
