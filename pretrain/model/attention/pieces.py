"""What is added to the scores of a block of queries, relative bias and -inf where a key is not seen, and its gradient.

A bias that depends on relative places only is held as its diagonals, [H, 2 reach - 1]. Blocks whose first query
stands at their first key, as in every short document, read a corner of one square matrix, made once per call, and
their gradients are summed in one; other blocks get a matrix of their own. For `blocked` and its backends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pretrain.model.attention.blocks import Block
from pretrain.model.attention.rules import AttentionRules, RelativeBias
from pretrain.sequence import SeqInfo

CORNER = 256  # tokens: a document of more spends its time in products, and a square per head would cost much memory


def reach_of(q_info: SeqInfo, k_info: SeqInfo) -> int:
    """One more than the largest distance between places."""
    return max(q_info.max_length, k_info.max_length)


class AddedScores:
    """Of all blocks of one call.

    Args:
        reach: one more than the largest distance between places.
        tensors: what the bias is computed from.
        device, dtype: of what is added.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        rules: AttentionRules,
        reach: int,
        tensors: Sequence[Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._rules, self._reach, self._device, self._dtype = rules, reach, device, dtype
        self._diagonals_HR = _diagonals(rules, reach, device, tensors)
        corners = [block for block in blocks if _reads_corner(block)]
        rows = max((block.rows for block in corners), default=0)
        keys = max((block.keys for block in corners), default=0)
        self._corner = Block(0, rows, 0, keys, 0)
        self._square = self._matrix(self._corner) if corners else None
        self._d_square: Tensor | None = None
        self._d_diagonals_HR: Tensor | None = None

    def of(self, block: Block) -> Tensor | None:
        """[H, rows, keys], or [1, rows, keys] without a bias; None where nothing is added."""
        if self._diagonals_HR is None and block.sees_all(self._rules.causal, self._rules.window):
            return None
        if self._square is not None and _reads_corner(block):
            return self._square[:, : block.rows, : block.keys]
        return self._matrix(block)

    def add_gradient(self, block: Block, d_scores: Tensor) -> None:
        """Notes the gradient [H, rows, keys] of what was added to a block."""
        if not _reads_corner(block):
            self._add_along_diagonals(block, d_scores)
            return
        if self._d_square is None:
            self._d_square = d_scores.new_zeros(d_scores.shape[0], self._corner.rows, self._corner.keys)
        self._d_square[:, : block.rows, : block.keys].add_(d_scores)

    def gradients(self, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor | None]:
        """Of what the bias is computed from, by what was noted."""
        if self._diagonals_HR is None or not any(wanted):
            return [None] * len(tensors)
        if self._d_square is not None:
            self._add_along_diagonals(self._corner, self._d_square)
            self._d_square = None
        noted = self._noted()
        with torch.enable_grad():
            twins = [x.detach().requires_grad_(want) for x, want in zip(tensors, wanted, strict=True)]
            diagonals_HR = _diagonals(self._rules, self._reach, self._device, twins)
            assert diagonals_HR is not None
            trained = [twin for twin in twins if twin.requires_grad]
            found = iter(torch.autograd.grad(diagonals_HR, trained, noted.to(diagonals_HR.dtype)))
        return [next(found) if want else None for want in wanted]

    def _matrix(self, block: Block) -> Tensor:
        """[H, rows, keys] in which each diagonal of the bias has its one value; [1, rows, keys] without a bias."""
        if self._diagonals_HR is None:
            matrix = torch.zeros(1, block.rows, block.keys, dtype=self._dtype, device=self._device)
        else:
            matrix = self._diagonals_HR[:, self._places(block)].unfold(-1, block.keys, 1).flip(1).to(self._dtype)
        if block.sees_all(self._rules.causal, self._rules.window):
            return matrix
        row = torch.arange(block.distance, block.distance + block.rows, device=self._device)
        seen = self._rules.allowed(row[:, None] - torch.arange(block.keys, device=self._device)[None, :])
        return matrix.masked_fill_(~seen, -torch.inf)

    def _places(self, block: Block) -> slice:
        """Where a block's relative places lie in the diagonals."""
        lowest = -(block.distance + block.rows - 1) + self._reach - 1
        return slice(lowest, lowest + block.rows + block.keys - 1)

    def _add_along_diagonals(self, block: Block, d_scores: Tensor) -> None:
        """The transpose of `_matrix`: sums along diagonals by shifting row i to the right by i."""
        heads, rows, keys = d_scores.shape
        skewed = d_scores.new_zeros(heads, rows, rows + keys)
        skewed[:, :, :keys] = d_scores.flip(1)
        skewed = skewed.flatten(1)[:, : rows * (rows + keys - 1)].view(heads, rows, rows + keys - 1)
        self._noted()[:, self._places(block)] += skewed.sum(dim=1)

    def _noted(self) -> Tensor:
        if self._d_diagonals_HR is None:
            assert self._diagonals_HR is not None
            self._d_diagonals_HR = torch.zeros_like(self._diagonals_HR, dtype=self._dtype)
        return self._d_diagonals_HR


def _reads_corner(block: Block) -> bool:
    return block.distance == 0 and max(block.rows, block.keys) <= CORNER


def _diagonals(rules: AttentionRules, reach: int, device: torch.device, tensors: Sequence[Tensor]) -> Tensor | None:
    """The bias at every relative place from 1 - reach to reach - 1, [H, 2 reach - 1]."""
    return None if rules.bias is None else RelativeBias(rules.bias.values, tuple(tensors)).diagonals(reach, device)
