"""What the routers of a forward pass chose, for whoever wants to know how evenly they use their experts.

Every mixture of experts says it once per forward pass, in the order of the layers, at the cost of one look-up while
nobody listens; nothing is copied and nothing waits for a device. Own design, as `loss.rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

Listener = Callable[[Tensor, Tensor], None]
_listener: ContextVar[Listener | None] = ContextVar("routing_listener", default=None)


def tell_routing(counts_E: Tensor, losses: Tensor) -> None:
    """Hands a layer's choices of each expert and its [balance, z] to whoever listens."""
    listener = _listener.get()
    if listener is not None:
        listener(counts_E, losses.detach())


@contextmanager
def routing_told(listener: Listener) -> Iterator[None]:
    """Every layer of experts that computes inside the block, in this thread, tells `listener`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
