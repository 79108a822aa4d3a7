"""What only a logged step tells: loss by source and by denoiser, how experts were used, and now and then norms and
attention by layer.

Takes the micro-batches of a step while they are computed -> gives the tables of its record. Values stay on the device
until the record is made; a step that is not logged has no watch. Every rank opens one for the same steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pretrain.config.schema import MoEConfig, RunConfig, UL2Objective
from pretrain.data.loader import Loader
from pretrain.data.raw_loader import RawLoader
from pretrain.data.state import DataState
from pretrain.engine.distributed import all_reduce_sums
from pretrain.loss.rows import losses_told
from pretrain.sequence import IGNORED_LABEL, Batch
from pretrain.train.layer_watch import LayerWatch
from pretrain.train.routing_watch import RoutingWatch


class StepWatch:
    """See the module.

    Args:
        layers: watches them too, if they are due.
    """

    def __init__(
        self, config: RunConfig, loader: Loader | RawLoader, state: DataState, layers: LayerWatch | None
    ) -> None:
        self._loader, self._state, self._layers = loader, state, layers
        objective = config.objective
        self._kinds = list(objective.denoisers) if isinstance(objective, UL2Objective) else []
        self._losses: list[tuple[Batch, Tensor]] = []
        self._routing = RoutingWatch(config.model) if isinstance(config.model, MoEConfig) else None

    @contextmanager
    def forward(self, batch: Batch) -> Iterator[None]:
        """Open during the forward pass of one micro-batch; one that only keeps the others company is not looked at."""
        with ExitStack() as stack:
            if batch.index >= 0:
                stack.enter_context(losses_told(lambda nll_T: self._losses.append((batch, nll_T))))
                if self._routing is not None:
                    stack.enter_context(self._routing.forward(batch))
                if self._layers is not None:
                    stack.enter_context(self._layers.forward(batch))
            yield

    def after_step(self) -> None:
        """The optimizer has stepped."""
        if self._layers is not None:
            self._layers.after_step()

    def tables(self, after: DataState) -> dict[str, Any]:
        """The tables of the record, and the fields of a mixture of experts. A collective.

        Args:
            after: where the next step begins.
        """
        names = list(self._loader.source_names)
        by_source, by_kind = _Sums(len(names)), _Sums(len(self._kinds))
        for batch, nll_T in self._losses:
            nll, counts = nll_T.double().cpu().numpy(), (batch.labels != IGNORED_LABEL).cpu().numpy()
            by_source.add(self._sources(batch), nll, counts)
            if batch.document_kinds is not None and self._kinds:
                by_kind.add(
                    np.repeat(batch.document_kinds, batch.decoder_info.lengths[: len(batch.document_kinds)]),
                    nll,
                    counts,
                )
        routed = [] if self._routing is None else self._routing.values()
        sums = all_reduce_sums([*routed, *by_source.values(), *by_kind.values()])
        routed, sums = sums[: len(routed)], sums[len(routed) :]
        losses = _losses(names, sums)
        shares = self._loader.shares(after)
        tables: dict[str, Any] = {"sources": {name: losses[name] | shares.get(name, {}) for name in names}}
        if self._kinds:
            tables["objectives"] = _losses(self._kinds, sums[2 * len(names) :])
        if self._routing is not None:
            tables |= self._routing.fields(routed)
        return tables if self._layers is None else tables | self._layers.tables()

    def _sources(self, batch: Batch) -> NDArray[np.int64]:
        """Source index of each token before padding."""
        rows = self._loader.row_sources(self._state, batch.index)
        return np.repeat(rows, batch.row_tokens or batch.labels.shape[0] // rows.size)


class _Sums:
    """Nats and targets by group."""

    def __init__(self, groups: int) -> None:
        self._nats, self._targets = np.zeros(groups), np.zeros(groups, dtype=np.int64)

    def add(self, group_of_token: NDArray[np.int64], nll: NDArray[np.float64], counts: NDArray[np.bool_]) -> None:
        """Tokens behind the groups' are padding."""
        groups, known = self._nats.size, group_of_token.size
        self._nats += np.bincount(group_of_token, weights=nll[:known], minlength=groups)
        self._targets += np.bincount(group_of_token, weights=counts[:known], minlength=groups).astype(np.int64)

    def values(self) -> list[int | float]:
        pairs = zip(self._nats.tolist(), self._targets.tolist(), strict=True)
        return [value for pair in pairs for value in pair]


def _losses(names: Sequence[str], sums: Sequence[int | float]) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "loss": sums[2 * place] / sums[2 * place + 1] if sums[2 * place + 1] else None,
            "target_tokens": int(sums[2 * place + 1]),
        }
        for place, name in enumerate(names)
    }
