"""What the tests of attention share: random tensors, and the definition in float64 from plain loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from pretrain.model.attention import AttentionRules, RelativeBias
from pretrain.sequence import SeqInfo

SCALE = 0.25
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, SeqInfo, SeqInfo, AttentionRules], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One call: lengths of both sides and the rules; the bias is a trained slope per head, by distance."""

    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    biased: bool = False
    heads: int = 4
    groups: int = 2
    std: float = 1.0

    def rules(self, slopes_H: torch.Tensor) -> AttentionRules:
        bias = RelativeBias(slope_values, (slopes_H,)) if self.biased else None
        return AttentionRules(self.causal, SCALE, self.window, self.softcap, bias)

    def with_groups(self, groups: int) -> Case:
        return replace(self, groups=groups)


def self_case(*lengths: int, **rules: object) -> Case:
    return Case(lengths, lengths, **rules)  # type: ignore[arg-type]


def slope_values(relative_R: torch.Tensor, slopes_H: torch.Tensor) -> torch.Tensor:
    wide_H = slopes_H.to(torch.promote_types(slopes_H.dtype, torch.float32))  # as the biases of positions do
    return wide_H[:, None] * relative_R.abs().clamp(max=9)


def inputs(case: Case, dtype: torch.dtype, head_width: int = 8) -> list[torch.Tensor]:
    """q, k, v, the slopes and the gradient of the output."""
    generator = torch.Generator().manual_seed(sum(case.q_lengths) * 1000 + sum(case.k_lengths))
    q_count, k_count = sum(case.q_lengths), sum(case.k_lengths)
    shapes = [
        (q_count, case.heads, head_width),
        (k_count, case.groups, head_width),
        (k_count, case.groups, head_width),
        (case.heads,),
        (q_count, case.heads, head_width),
    ]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    drawn[0] *= case.std
    drawn[1] *= case.std
    return [x.to(dtype) for x in drawn]


def definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor, case: Case
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and mask in float64: document by document, query by query, head by head."""
    rows = []
    mask = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool)
    q_start = k_start = 0
    for q_length, k_length in zip(case.q_lengths, case.k_lengths, strict=True):
        for i in range(q_length):
            seen = []
            for j in range(k_length):
                distance = i + k_length - q_length - j
                near = case.window is None or abs(distance) < case.window
                if near and (distance >= 0 or not case.causal):
                    seen.append(j)
            mask[q_start + i, [k_start + j for j in seen]] = True
            rows.append(_row(q[q_start + i], k[k_start:], v[k_start:], seen, i + k_length - q_length, slopes, case))
        q_start, k_start = q_start + q_length, k_start + k_length
    return torch.stack(rows), mask


def _row(
    q_HK: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: list[int],
    place: int,
    slopes_H: torch.Tensor,
    case: Case,
) -> torch.Tensor:
    if not seen:
        return torch.zeros_like(q_HK)
    heads = []
    for head in range(case.heads):
        group = head * case.groups // case.heads
        scores = k[seen, group] @ q_HK[head] * SCALE
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        if case.biased:
            away = torch.tensor([min(abs(j - place), 9) for j in seen], dtype=torch.float64)
            scores = scores + slopes_H[head] * away
        heads.append(torch.softmax(scores, dim=0) @ v[seen, group])
    return torch.stack(heads)


def relative_error(found: torch.Tensor, right: torch.Tensor) -> float:
    return ((found.detach().double() - right.detach()).norm() / right.detach().norm()).item()


def errors(attention: Attention, case: Case, dtype: torch.dtype, head_width: int = 8) -> dict[str, float]:
    """Relative Frobenius errors of output and gradients against the definition on the same rounded inputs."""
    *values, grad = inputs(case, dtype, head_width)
    ours = [x.clone().requires_grad_() for x in values]
    exact = [x.detach().double().requires_grad_() for x in values]
    right, _ = definition(exact[0], exact[1], exact[2], exact[3], case)
    right.backward(grad.double())
    q_info, k_info = SeqInfo.from_lengths(case.q_lengths), SeqInfo.from_lengths(case.k_lengths)
    out = attention(ours[0], ours[1], ours[2], q_info, k_info, case.rules(ours[3]))
    assert out.dtype == dtype
    out.backward(grad)
    found = {"out": relative_error(out, right)}
    for name, mine, theirs in zip(("dq", "dk", "dv", "dbias"), ours, exact, strict=True):
        if theirs.grad is not None and theirs.grad.norm() > 1e-9:
            assert mine.grad is not None
            found[name] = relative_error(mine.grad, theirs.grad)
    return found
