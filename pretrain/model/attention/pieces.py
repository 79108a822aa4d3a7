"""What is computed at a time: slices, mask and relative bias of a block or a tile, and the way back.

A piece gives queries as [heads, rows, K] and keys as [groups, keys, K]; a tile's documents are more heads. A bias
that depends on relative places only is held as its diagonals, [H, 2 reach - 1], and becomes a matrix for one
piece at a time; the gradients of pieces are summed along diagonals again. Shared by `qblock` and `sdpa`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from pretrain.model.attention.blocks import Block, Side, Tile, plan_blocks, plan_tiles
from pretrain.model.attention.rules import AttentionRules, RelativeBias
from pretrain.sequence import SeqInfo


class BlockPiece:
    """A block of queries of one document; scores have the shape [H, rows, keys]."""

    def __init__(self, block: Block, rules: AttentionRules) -> None:
        self._block, self._rules = block, rules
        self.has_blind_rows = block.has_blind_rows(rules.causal, rules.window)

    def queries(self, x_THK: Tensor) -> Tensor:
        return x_THK[self._block.q_start : self._block.q_stop].transpose(0, 1)

    def keys(self, x_TGK: Tensor) -> Tensor:
        return x_TGK[self._block.k_start : self._block.k_stop].transpose(0, 1)

    def put_queries(self, out_THK: Tensor, value_HRK: Tensor) -> None:
        out_THK[self._block.q_start : self._block.q_stop] = value_HRK.transpose(0, 1)

    def add_keys(self, sum_TGK: Tensor, value_GJK: Tensor) -> None:
        sum_TGK[self._block.k_start : self._block.k_stop] += value_GJK.transpose(0, 1)

    def mask(self, heads: int, device: torch.device) -> Tensor | None:
        """[rows, keys] of what is visible; None where everything is."""
        block, rules = self._block, self._rules
        if block.sees_all(rules.causal, rules.window):
            return None
        row = torch.arange(block.distance, block.distance + block.rows, device=device)
        return rules.allowed(row[:, None] - torch.arange(block.keys, device=device)[None, :])

    def bias(self, diagonals_HR: Tensor, reach: int) -> Tensor:
        """[H, rows, keys]."""
        return _expand(diagonals_HR, self._relative(reach), self._block.keys)

    def add_bias(self, d_diagonals_HR: Tensor, d_scores: Tensor, reach: int) -> None:
        _add(d_diagonals_HR, d_scores, self._relative(reach))

    def dropped(self, heads: int, like: Tensor) -> Tensor | None:
        """Factors of the weights [H, rows, keys], the same however the queries were cut into blocks."""
        if self._rules.dropout is None:
            return None
        block = self._block
        places = range(block.q_start, block.q_stop), range(block.k_start, block.k_stop)
        return self._rules.dropout.factors(heads, *places, like)

    def _relative(self, reach: int) -> slice:
        block = self._block
        return _relative(block.distance, block.rows, block.keys, reach)


class TilePiece:
    """N short documents as a batch; scores have the shape [N H, rows, keys]. Its places beyond a document are zeros
    that no query of the document sees; what stands there sees its own like, so that no row is without keys."""

    has_blind_rows = False

    def __init__(self, tile: Tile, rules: AttentionRules, device: torch.device) -> None:
        self._rules = rules
        self._q, self._k = _Places(tile.queries, device), _Places(tile.keys, device)

    def queries(self, x_THK: Tensor) -> Tensor:
        return self._q.take(x_THK)

    def keys(self, x_TGK: Tensor) -> Tensor:
        return self._k.take(x_TGK)

    def put_queries(self, out_THK: Tensor, value: Tensor) -> None:
        self._q.put(out_THK, value)

    def add_keys(self, sum_TGK: Tensor, value: Tensor) -> None:
        self._k.put(sum_TGK, value)  # a document's keys are in no other piece

    def mask(self, heads: int, device: torch.device) -> Tensor:
        """[N H, rows, keys], for so many N H."""
        rows, keys = (torch.arange(side.width, device=device) for side in (self._q, self._k))
        mask = ~self._k.beyond[:, None, :] | self._q.beyond[:, :, None]
        mask = mask & self._rules.allowed(rows[:, None] - keys[None, :])
        return mask[:, None].expand(-1, heads // self._q.count, -1, -1).flatten(0, 1)

    def bias(self, diagonals_HR: Tensor, reach: int) -> Tensor:
        """[N H, rows, keys]."""
        one_HRJ = _expand(self._widened(diagonals_HR, reach), self._relative(reach), self._k.width)
        return one_HRJ.expand(self._q.count, -1, -1, -1).flatten(0, 1)

    def add_bias(self, d_diagonals_HR: Tensor, d_scores: Tensor, reach: int) -> None:
        wide = torch.zeros_like(self._widened(d_diagonals_HR, reach))
        _add(wide, d_scores.unflatten(0, (self._q.count, -1)).sum(dim=0), self._relative(reach))
        margin = self._margin(reach)
        d_diagonals_HR += wide[:, margin : wide.shape[1] - margin]

    def dropped(self, heads: int, like: Tensor) -> None:
        return None  # not planned with dropout, which asks for packed places

    def _margin(self, reach: int) -> int:
        return max(0, self._q.width - reach)

    def _widened(self, diagonals_HR: Tensor, reach: int) -> Tensor:
        """Where a tile is wider than the longest document: nothing there is seen."""
        margin = self._margin(reach)
        return functional.pad(diagonals_HR, (margin, margin)) if margin else diagonals_HR

    def _relative(self, reach: int) -> slice:
        return _relative(0, self._q.width, self._k.width, reach + self._margin(reach))


class _Places:
    """One side of a tile: the tokens of its documents in the packed sequence and in the batch."""

    def __init__(self, side: Side, device: torch.device) -> None:
        self.count, self.width = len(side.starts), side.width
        place = torch.arange(side.width)
        starts, lengths = (torch.tensor(x)[:, None] for x in (side.starts, side.lengths))
        beyond, tokens = place >= lengths, starts + torch.minimum(place, lengths - 1)
        slots = torch.nonzero(~beyond.flatten())[:, 0]  # of the batch, where tokens are; on the host, so nobody waits
        self.beyond, self._tokens, self._slots = (x.to(device) for x in (beyond, tokens, slots))
        self._own = self._tokens.flatten()[self._slots]

    def take(self, x_TXK: Tensor) -> Tensor:
        """[T, X, K] -> [N X, width, K], zeros beyond each document."""
        taken = x_TXK[self._tokens].masked_fill_(self.beyond[:, :, None, None], 0.0)
        return taken.transpose(1, 2).flatten(0, 1)

    def put(self, out_TXK: Tensor, value: Tensor) -> None:
        flat = value.unflatten(0, (self.count, -1)).transpose(1, 2).flatten(0, 1)
        out_TXK.index_copy_(0, self._own, flat[self._slots].to(out_TXK.dtype))


Piece = BlockPiece | TilePiece


def cut(q_info: SeqInfo, k_info: SeqInfo, rules: AttentionRules, num_heads: int, device: torch.device) -> list[Piece]:
    """All that is to be computed, short documents first."""
    lengths = q_info.lengths, k_info.lengths
    counts_distances = rules.causal or rules.window is not None or rules.bias is not None
    tiles, others = plan_tiles(*lengths, same_places=counts_distances, num_heads=num_heads)
    if rules.dropout is not None:
        tiles, others = [], list(range(len(q_info.lengths)))
    blocks = plan_blocks(
        *lengths, causal=rules.causal, window=rules.window, num_heads=num_heads, only=frozenset(others)
    )
    pieces: list[Piece] = [TilePiece(tile, rules, device) for tile in tiles]
    return pieces + [BlockPiece(block, rules) for block in blocks]


def reach_of(q_info: SeqInfo, k_info: SeqInfo) -> int:
    """One more than the largest distance between places."""
    return max(q_info.max_length, k_info.max_length)


def bias_diagonals(rules: AttentionRules, reach: int, device: torch.device, tensors: Sequence[Tensor]) -> Tensor | None:
    """The bias at every relative place from 1 - reach to reach - 1, [H, 2 reach - 1]."""
    return None if rules.bias is None else RelativeBias(rules.bias.values, tuple(tensors)).diagonals(reach, device)


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


def _relative(distance: int, rows: int, keys: int, reach: int) -> slice:
    """Where relative places of `rows` queries, the first `distance` behind the first key, lie in the diagonals."""
    lowest = -(distance + rows - 1) + reach - 1
    return slice(lowest, lowest + rows + keys - 1)


def _expand(diagonals_HR: Tensor, relative: slice, keys: int) -> Tensor:
    """[H, rows, keys] in which each diagonal has its one value."""
    return diagonals_HR[:, relative].unfold(-1, keys, 1).flip(1)


def _add(d_diagonals_HR: Tensor, d_scores: Tensor, relative: slice) -> None:
    """The transpose of `_expand`: sums along diagonals by shifting row i to the right by i."""
    heads, rows, keys = d_scores.shape
    skewed = d_scores.new_zeros(heads, rows, rows + keys)
    skewed[:, :, :keys] = d_scores.flip(1)
    skewed = skewed.flatten(1)[:, : rows * (rows + keys - 1)].view(heads, rows, rows + keys - 1)
    d_diagonals_HR[:, relative] += skewed.sum(dim=1)
