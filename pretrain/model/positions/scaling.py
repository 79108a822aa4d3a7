"""Frequencies of rotary positions, and their scalings for sequences longer than the original training.

Takes a head width, theta and a scaling of the config -> frequencies [K/2] in fp32 and the factor of cos
and sin. Sources: Su et al. 2021; Chen et al. 2023 (linear); bloc97 2023 (NTK-aware); Peng et al. 2023
(YaRN); Llama 3.1's code. Equal to `transformers.modeling_rope_utils` bit for bit (tested).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pretrain.config.schema import Llama3Rope, RopeScaling, YarnRope
from pretrain.model.positions.exchange import ntk_theta


def geometric_frequencies(count: int, theta: float, device: torch.device) -> Tensor:
    """theta^(-i/count) for i < count, fp32."""
    return 1.0 / theta ** (torch.arange(count, device=device, dtype=torch.float32) / count)


@torch.no_grad()
def rotary_frequencies(
    head_width: int, theta: float, scaling: RopeScaling | None, device: torch.device
) -> tuple[Tensor, float]:
    """Radians per token of each pair of dimensions, and what cos and sin are multiplied by."""
    count = head_width // 2
    if scaling is None:
        return geometric_frequencies(count, theta, device), 1.0
    if scaling.kind == "linear":
        return geometric_frequencies(count, theta, device) / scaling.factor, 1.0
    if scaling.kind == "ntk":
        return geometric_frequencies(count, ntk_theta(theta, scaling.factor, head_width), device), 1.0
    if scaling.kind == "llama3":
        return _llama3(geometric_frequencies(count, theta, device), scaling), 1.0
    return _yarn(head_width, theta, scaling, device), yarn_magnitude(scaling)


def yarn_magnitude(scaling: YarnRope) -> float:
    """Factor of cos and sin, so of queries and keys: sharper attention over longer sequences."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0


def _yarn(head_width: int, theta: float, scaling: YarnRope, device: torch.device) -> Tensor:
    """Many turns within the original length: kept; less than beta_slow turns: divided; a ramp between."""
    count = head_width // 2

    def pair_with(turns: float) -> float:
        original = scaling.original_sequence_length
        return (head_width * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(theta))

    low = max(math.floor(pair_with(scaling.beta_fast)), 0)
    high: float = min(math.ceil(pair_with(scaling.beta_slow)), head_width - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(count, device=device, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    periods = theta ** (torch.arange(count, device=device, dtype=torch.float32) / count)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _llama3(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    """Long waves divided by the factor, short ones kept, a smooth change between."""
    original, low, high = scaling.original_sequence_length, scaling.low_freq_factor, scaling.high_freq_factor
    waves = 2 * math.pi / frequencies
    smooth = (original / waves - low) / (high - low)
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(waves > original / low, frequencies / scaling.factor, frequencies)
    return torch.where((waves < original / high) | (waves > original / low), scaled, between)
