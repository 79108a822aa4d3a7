"""Rotary positions as `transformers` writes them in config.json, both ways. PURE: no torch.

Every scaling of ours has an exact counterpart there (NTK is a larger base); theirs that change with the
length of the input (dynamic, longrope) have none here and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrain.config.schema import LinearRope, Llama3Rope, NtkRope, RopeScaling, YarnRope
from pretrain.errors import UserError


def ntk_theta(theta: float, factor: float, head_width: int) -> float:
    """The base whose lowest frequency is that of `theta` divided by `factor`, the highest unchanged."""
    return theta * factor ** (head_width / (head_width - 2))


def to_hf_rope(theta: float, scaling: RopeScaling | None, head_width: int) -> dict[str, Any]:
    """The value of `rope_parameters`."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    if isinstance(scaling, NtkRope):
        return {"rope_type": "default", "rope_theta": ntk_theta(theta, scaling.factor, head_width)}
    body = {"rope_type": scaling.kind, "rope_theta": theta, "factor": scaling.factor}
    if isinstance(scaling, LinearRope):
        return body
    body["original_max_position_embeddings"] = scaling.original_sequence_length
    if isinstance(scaling, Llama3Rope):
        return body | {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    body |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    return body if scaling.attention_factor is None else body | {"attention_factor": scaling.attention_factor}


def from_hf_rope(rope: Mapping[str, Any]) -> RopeScaling | None:
    """Our scaling of a `rope_parameters` or `rope_scaling` value (its theta is the caller's).

    Raises:
        UserError: a kind or an option that we do not compute.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    taken = {
        "linear": {"factor"},
        "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
        "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"},
    }
    values = {name: value for name, value in rope.items() if name not in ("rope_type", "type", "rope_theta")}
    values = {name: value for name, value in values.items() if value is not None}
    if kind == "yarn" and values.get("truncate") is True:
        del values["truncate"]  # what we do
    unknown = sorted(values.keys() - taken.get(str(kind), set()))
    if kind not in taken or unknown:
        raise UserError(
            f"rope_parameters={dict(rope)} cannot be imported ({', '.join(unknown) or kind}). Known are default, "
            f"{', '.join(taken)} with their published options. Convert the model to one of these."
        )
    if "original_max_position_embeddings" in values:
        values["original_sequence_length"] = values.pop("original_max_position_embeddings")
    kinds: dict[str, type[RopeScaling]] = {"linear": LinearRope, "llama3": Llama3Rope, "yarn": YarnRope}
    try:
        return kinds[kind](**values)
    except ValueError as error:
        raise UserError(
            f"rope_parameters={dict(rope)} cannot be imported: {error}. A scaling needs all of its values. "
            "Correct config.json."
        ) from error
