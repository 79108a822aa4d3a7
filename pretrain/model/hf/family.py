"""What a family states to be exchanged with transformers, and the checks that all their configs share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pretrain.config.schema import DecoderConfig, EncoderConfig, EncoderDecoderConfig, GPT2Config
from pretrain.errors import UserError
from pretrain.model.hf.weights import Weight

State = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What an exported config says beyond the model's own.

    Attributes:
        max_length: sequence length of the training.
        dtype: of the written tensors.
        eos_id, pad_id, start_id: of the tokenizer; None leaves their defaults.
    """

    max_length: int
    dtype: torch.dtype = torch.float32
    eos_id: int | None = None
    pad_id: int | None = None
    start_id: int | None = None

    def common(self) -> dict[str, Any]:
        """Entries that every config.json has."""
        ids = {"eos_token_id": self.eos_id, "pad_token_id": self.pad_id, "decoder_start_token_id": self.start_id}
        named = {name: value for name, value in ids.items() if value is not None}
        return {**named, "dtype": str(self.dtype).removeprefix("torch."), "use_cache": True}


def _same_tensor(name: str, tensor: Tensor, config: Any) -> Tensor:
    del name, config
    return tensor


def _nothing(config: Any) -> dict[str, tuple[int, ...] | str]:
    del config
    return {}


def _unchanged(state: State, config: Any) -> State:
    del config
    return state


@dataclass(frozen=True, slots=True)
class Exchange:
    """One family <-> one of theirs.

    Attributes:
        weights: every parameter, from our config.
        to_config: our config -> the body of config.json. Raises UserError for what theirs cannot compute.
        from_config: the body of config.json -> our config. Raises UserError for what ours cannot compute.
        convert: a tensor by its name there, as it is here -> as they store it.
        extras: what they store and we do not have: zeros of a shape, or a copy of what another name holds.
        before_import: their state dict as they store it -> with the names of `weights` and nothing else.
    """

    weights: Callable[[Any], list[Weight]]
    to_config: Callable[[Any, ExportOptions], dict[str, Any]]
    from_config: Callable[[Mapping[str, Any]], Any]
    convert: Callable[[str, Tensor, Any], Tensor] = _same_tensor
    extras: Callable[[Any], Mapping[str, tuple[int, ...] | str]] = _nothing
    before_import: Callable[[State, Any], State] = _unchanged


def refuse(body: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]], family: str) -> None:
    """Refuses entries whose value is not among the allowed ones; an absent entry counts as allowed.

    Raises:
        UserError: the first that is not.
    """
    for name, values in allowed.items():
        if name in body and body[name] not in values:
            raise UserError(
                f"{name}={body[name]} cannot be imported. model.family={family} has no such part. "
                f"Only {' or '.join(map(str, values))} can be."
            )


def refuse_scaled(config: DecoderConfig | GPT2Config | EncoderConfig | EncoderDecoderConfig) -> None:
    """Raises UserError for scalings of the computation that no config.json can say."""
    mup = getattr(config, "mup", None)
    if mup is not None or config.depth_scaling in ("branch", "deepnorm"):
        what = f"model.depth_scaling={config.depth_scaling}" if mup is None else "a model with model.mup"
        raise UserError(
            f"{what} cannot be exported. It scales logits, scores or branches, which transformers cannot be told. "
            "Train with the standard parametrisation to export the model."
        )


def require(body: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises UserError naming the entries that config.json lacks."""
    missing = [name for name in names if name not in body]
    if missing:
        raise UserError(f"config.json lacks {', '.join(missing)}. Export the model again.")


def without(state: State, *names: str) -> State:
    """The state dict less copies and constants that are stored under these names or below these prefixes."""
    return {name: tensor for name, tensor in state.items() if not name.startswith(names)}
