"""What a block of queries takes from a call of attention, and what it gives back: slices, mask, relative bias.

A bias that depends on relative places only is held as its diagonals, [H, 2 reach - 1], and becomes a matrix
for one block at a time; the gradients of blocks are summed along diagonals again. For `blocked` and its backends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pretrain.model.attention.blocks import Block
from pretrain.model.attention.rules import AttentionRules, RelativeBias
from pretrain.sequence import SeqInfo


def heads_first(q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
    q = q_THK[block.q_start : block.q_stop].transpose(0, 1)
    return q, *(x[block.k_start : block.k_stop].transpose(0, 1) for x in (k_TGK, v_TGK))


def block_mask(block: Block, rules: AttentionRules, device: torch.device) -> Tensor | None:
    """[rows, keys] of what is visible; None where everything is."""
    if block.sees_all(rules.causal, rules.window):
        return None
    row = torch.arange(block.distance, block.distance + block.rows, device=device)
    return rules.allowed(row[:, None] - torch.arange(block.keys, device=device)[None, :])


def masked_bias(mask: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What a kernel of torch takes as its mask: [rows, keys] booleans, or [1, H, rows, keys] that are added."""
    if bias is None:
        return mask
    bias = bias.to(dtype)
    return (bias if mask is None else bias.masked_fill(~mask, -torch.inf)).unsqueeze(0)


def reach_of(q_info: SeqInfo, k_info: SeqInfo) -> int:
    """One more than the largest distance between places."""
    return max(q_info.max_length, k_info.max_length)


def bias_diagonals(rules: AttentionRules, reach: int, device: torch.device, tensors: Sequence[Tensor]) -> Tensor | None:
    """The bias at every relative place from 1 - reach to reach - 1, [H, 2 reach - 1]."""
    return None if rules.bias is None else RelativeBias(rules.bias.values, tuple(tensors)).diagonals(reach, device)


def _places(block: Block, reach: int) -> slice:
    """Where a block's relative places lie in the diagonals."""
    lowest = -(block.distance + block.rows - 1) + reach - 1
    return slice(lowest, lowest + block.rows + block.keys - 1)


def expand_diagonals(diagonals_HR: Tensor, block: Block, reach: int) -> Tensor:
    """[H, rows, keys] in which each diagonal has its one value."""
    return diagonals_HR[:, _places(block, reach)].unfold(-1, block.keys, 1).flip(1)


def add_diagonals(d_diagonals_HR: Tensor, d_scores: Tensor, block: Block, reach: int) -> None:
    """The transpose of `expand_diagonals`: sums along diagonals by shifting row i to the right by i."""
    heads, rows, keys = d_scores.shape
    skewed = d_scores.new_zeros(heads, rows, rows + keys)
    skewed[:, :, :keys] = d_scores.flip(1)
    skewed = skewed.flatten(1)[:, : rows * (rows + keys - 1)].view(heads, rows, rows + keys - 1)
    d_diagonals_HR[:, _places(block, reach)] += skewed.sum(dim=1)


def tensor_gradients(
    rules: AttentionRules,
    reach: int,
    tensors: Sequence[Tensor],
    d_diagonals_HR: Tensor | None,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of what the bias is computed from."""
    if d_diagonals_HR is None or not any(wanted):
        return [None] * len(tensors)
    with torch.enable_grad():
        twins = [x.detach().requires_grad_(want) for x, want in zip(tensors, wanted, strict=True)]
        diagonals_HR = bias_diagonals(rules, reach, d_diagonals_HR.device, twins)
        assert diagonals_HR is not None
        trained = [twin for twin in twins if twin.requires_grad]
        found = iter(torch.autograd.grad(diagonals_HR, trained, d_diagonals_HR.to(diagonals_HR.dtype)))
    return [next(found) if want else None for want in wanted]
