"""A feed-forward block of many experts of which each token passes a few: the router, the experts, the exchange.

Takes tokens and their layout -> their weighted outputs, and the two losses that keep the router usable. No
capacity: an expert gets as many tokens as choose it, none is dropped. Padding passes no expert and counts in no loss.
Where ranks share the experts (`group`), every call exchanges tokens, also with none of its own: a collective.
Everything that is summed is summed in a fixed order. The experts' gate is always eager: the number of their
tokens changes with every call.
Sources: Shazeer et al. 2017; Fedus et al. 2021, equations 4-6 (balance); Zoph et al. 2022, equation 5 (z).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from pretrain.model.init import Initial
from pretrain.model.layers import Linear, gated_silu
from pretrain.model.routing import tell_routing
from pretrain.sequence import SeqInfo


class Experts(nn.Module):
    """SwiGLU blocks below each other in two matrices: of each expert gate then up, and down.

    Attributes:
        group: the ranks that share the experts, or None; then this rank holds its 1 / size of them, in rank order.
    """

    def __init__(self, num_experts: int, width: int, hidden: int, inner: Initial, outer: Initial) -> None:
        super().__init__()
        self.num_experts, self.width, self.hidden = num_experts, width, hidden
        self.gate_up = nn.Parameter(torch.empty(num_experts * 2 * hidden, width))
        self.down = nn.Parameter(torch.empty(num_experts * width, hidden))
        self.initial: dict[str, Initial] = {"gate_up": inner, "down": outer}
        self.group: dist.ProcessGroup | None = None

    def forward(self, x_ND: Float[Tensor, "N D"], counts_E: Int[Tensor, " E"]) -> Float[Tensor, "N D"]:
        """Each row through its expert.

        Args:
            x_ND: rows of expert 0, then of expert 1, and so on.
            counts_E: how many each has.
        """
        if self.group is None:
            return self._compute(x_ND, counts_E.tolist())
        size = dist.get_world_size(self.group)
        received_RE = torch.empty_like(counts_E)
        dist.all_to_all_single(received_RE, counts_E, group=self.group)
        received_RE = received_RE.view(size, -1)
        sent, received = counts_E.view(size, -1).sum(dim=1).tolist(), received_RE.sum(dim=1).tolist()
        rows_ND = exchange(x_ND, sent, received, self.group)
        # They come by rank and within it by expert; an expert wants all of its own together.
        expert_N = torch.arange(received_RE.shape[1], device=x_ND.device).repeat(size)
        order_N = expert_N.repeat_interleave(received_RE.flatten()).argsort(stable=True)
        out_ND = self._compute(rows_ND.index_select(0, order_N), received_RE.sum(dim=0).tolist())
        return exchange(out_ND.index_select(0, _inverse(order_N)), received, sent, self.group)

    def _compute(self, x_ND: Tensor, counts: list[int]) -> Tensor:
        # Also with no row: every weight gives a gradient, which ZeRO's collectives wait for.
        gate_up = self.gate_up.view(-1, 2 * self.hidden, self.width).unbind()
        down = self.down.view(-1, self.width, self.hidden).unbind()
        rows = x_ND.split(counts)
        return torch.cat(
            [
                functional.linear(gated_silu(functional.linear(x, first)), second)
                for x, first, second in zip(rows, gate_up, down, strict=True)
            ]
        )


class SparseMLP(nn.Module):
    """The router and its experts.

    Args:
        normalised: the weights of a token's experts sum to 1 (Mixtral); else they are its probabilities as they are.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        num_experts: int,
        experts_per_token: int,
        inner: Initial,
        outer: Initial,
        *,
        normalised: bool,
    ) -> None:
        super().__init__()
        self.experts_per_token, self.normalised = experts_per_token, normalised
        self.router = Linear(width, num_experts, inner)
        self.experts = Experts(num_experts, width, hidden, inner, outer)

    def forward(self, x_TD: Float[Tensor, "T D"], info: SeqInfo) -> tuple[Float[Tensor, "T D"], Tensor]:
        """Outputs, 0 for padding; [balance, z], both means over the tokens that are no padding (0 without any)."""
        padding = info.lengths[-1] if info.padding else 0
        real_TD, tail_TD = x_TD.split([x_TD.shape[0] - padding, padding])
        logits_TE = self.router(real_TD)
        logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
        probability_TE = torch.softmax(logits_TE, dim=-1)
        weight_TC, chosen_TC = probability_TE.topk(self.experts_per_token, dim=-1)
        if self.normalised:
            weight_TC = weight_TC / weight_TC.sum(dim=-1, keepdim=True)
        counts_E = chosen_TC.flatten().bincount(minlength=probability_TE.shape[1])
        out_TD = self._through_experts(real_TD, chosen_TC, weight_TC.to(x_TD.dtype), counts_E)
        losses = router_losses(logits_TE, probability_TE, counts_E)
        tell_routing(counts_E, losses)
        return torch.cat([out_TD, tail_TD.new_zeros(tail_TD.shape)]), losses

    def _through_experts(self, x_TD: Tensor, chosen_TC: Tensor, weight_TC: Tensor, counts_E: Tensor) -> Tensor:
        order_N = chosen_TC.flatten().argsort(stable=True)
        # Copies before the permutation: then no gradient is a sum in an order that a device may choose.
        copies_ND = x_TD.unsqueeze(1).expand(-1, chosen_TC.shape[1], -1).reshape(-1, x_TD.shape[1])
        out_ND = self.experts(copies_ND.index_select(0, order_N), counts_E)
        back_TCD = out_ND.index_select(0, _inverse(order_N)).view(*chosen_TC.shape, x_TD.shape[1])
        return (back_TCD * weight_TC.unsqueeze(-1)).sum(dim=1)


def router_losses(logits_TE: Tensor, probability_TE: Tensor, counts_E: Tensor) -> Tensor:
    """[E sum_e (share of tokens that chose e) (mean probability of e), mean logsumexp^2]; zeros without tokens."""
    tokens = max(1, logits_TE.shape[0])
    share_E = counts_E.to(logits_TE.dtype) / tokens
    balance = logits_TE.shape[1] * (share_E * probability_TE.sum(dim=0)).sum() / tokens
    return torch.stack([balance, torch.logsumexp(logits_TE, dim=-1).square().sum() / tokens])


def _inverse(order_N: Tensor) -> Tensor:
    places = torch.arange(order_N.shape[0], device=order_N.device)
    return torch.empty_like(order_N).scatter_(0, order_N, places)


def exchange(rows_ND: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Sends the first `sent[0]` rows to the first rank of a group and so on; what came, in rank order. A collective,
    and so is its backward pass."""
    out: Tensor = _Exchange.apply(rows_ND, sent, received, group)
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows_ND, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad_ND, ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(rows_ND: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out_ND = rows_ND.new_empty(sum(received), rows_ND.shape[1])
    # As bytes: gloo does not know bf16 here.
    dist.all_to_all_single(
        out_ND.view(torch.uint8), rows_ND.contiguous().view(torch.uint8), received, sent, group=group
    )
    return out_ND
