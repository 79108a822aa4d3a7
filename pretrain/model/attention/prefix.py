"""Causal attention whose documents begin with a part that sees itself in both directions (prefix LM).

Two calls without any mask of their own, so that every backend can do it and none counts more pairs than there
are: first parts against themselves, both ways; second parts against their whole documents, causal, ends
aligned as with a cache. Exact: a first part sees nothing behind it, a second part all that is before.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from pretrain.sequence import SeqInfo


@runtime_checkable
class Attend(Protocol):
    """`attend` with its rules bound, all but causal."""

    def __call__(
        self, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor, *, q_info: SeqInfo, k_info: SeqInfo, causal: bool
    ) -> Tensor: ...


def attend_with_prefix(
    attend_first: Attend,
    attend_second: Attend,
    q_THK: Tensor,
    k_TGK: Tensor,
    v_TGK: Tensor,
    q_info: SeqInfo,
    k_info: SeqInfo,
) -> Tensor:
    """Outputs in the order of the queries; first and second parts each through their own call.

    Raises:
        ValueError: the keys are not those of the queries' own tokens.
    """
    layout = q_info.prefix
    assert layout is not None
    if k_info.lengths != q_info.lengths:
        raise ValueError("a first part that sees itself in both directions needs the keys of the same tokens")
    parts = []
    if layout.first_info is not None:
        q, k, v = (x.index_select(0, layout.first) for x in (q_THK, k_TGK, v_TGK))
        parts.append(attend_first(q, k, v, q_info=layout.first_info, k_info=layout.first_info, causal=False))
    if layout.second_info is not None and layout.keys_info is not None:
        q = q_THK.index_select(0, layout.second)
        k, v = (x if layout.keys is None else x.index_select(0, layout.keys) for x in (k_TGK, v_TGK))
        parts.append(attend_second(q, k, v, q_info=layout.second_info, k_info=layout.keys_info, causal=True))
    return torch.cat(parts).index_select(0, layout.order)
