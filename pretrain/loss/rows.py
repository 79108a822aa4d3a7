"""Losses of single targets, for whoever wants them divided otherwise than by the whole micro-batch.

The fused loss says them once per forward pass, at the cost of one look-up while nobody listens; nothing is copied and
nothing waits for a device. Own design, as `model.attention.observe`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_listener: ContextVar[Callable[[Tensor], None] | None] = ContextVar("loss_listener", default=None)


def tell_losses(nll_of_chunks: Sequence[Tensor]) -> None:
    """Hands the negative log-likelihood of each place, 0 where there is no target, to whoever listens."""
    listener = _listener.get()
    if listener is not None:
        listener(torch.cat(list(nll_of_chunks)))


@contextmanager
def losses_told(listener: Callable[[Tensor], None]) -> Iterator[None]:
    """Every loss computed inside the block, in this thread, goes to `listener` as nll [T], at least fp32, detached."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
