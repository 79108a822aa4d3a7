"""Norms of weights, updates and activations by layer, and what the attention heads do, of one step.

Takes the engine before and after a step -> gives the tables `layers` and `attention`. Norms are over all ranks'
shares of the fp32 masters, so they are those of the whole layer at every ZeRO stage. The masters are copied to the
host for the time of the step. Attention is computed again, densely, for the longest document of this rank's first
micro-batch (at most 256 of its queries), not for objectives whose documents begin with a part seen from both sides.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.engine.distributed import all_reduce_sums
from pretrain.engine.engine import Engine
from pretrain.engine.state import BUFFER, MASTER
from pretrain.model.attention.observe import AttentionCall, HeadFacts, head_facts, map_of, observed, warnings_of
from pretrain.model.checkpointing import LayerStack
from pretrain.sequence import Batch, SeqInfo

MOST_QUERIES = 256


class LayerWatch:
    """One step's watch. Made before its first forward pass.

    Args:
        attention: look at the heads too; one rank is enough.
    """

    def __init__(self, engine: Engine, *, attention: bool) -> None:
        self._engine, self._wants_attention = engine, attention
        self._layers = layers_of(engine.module)
        groups = engine.groups()
        self._trained = [name for name in engine.shapes() if groups[name] != BUFFER]
        self._names = list(dict.fromkeys([*self._layers, *(self._layer(name) for name in self._trained)]))
        self._squares: dict[str, list[tuple[Tensor, int]]] = {name: [] for name in self._layers}
        self._heads: list[tuple[str, list[HeadFacts], list[str]]] = []
        self._looked = False
        self._before = {key: share.to("cpu", copy=True) for key, share in self._masters()}
        self._parameter = dict.fromkeys(self._names, 0.0)
        self._update = dict.fromkeys(self._names, 0.0)

    @contextmanager
    def forward(self, batch: Batch) -> Iterator[None]:
        """Open during the forward pass of a micro-batch."""
        handles = [layer.register_forward_hook(self._hook(name)) for name, layer in self._layers.items()]
        with ExitStack() as stack:
            info = batch.decoder_info
            lengths = info.lengths[: -1 if info.padding else None]
            if self._wants_attention and not self._looked and info.prefix is None and lengths:  # not only padding
                self._looked = True
                stack.enter_context(observed(self._observer(lengths)))
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

    @torch.no_grad()
    def after_step(self) -> None:
        """Sums this rank's share of the masters and of what the step did to them."""
        for (name, start), share in self._masters():
            layer, now = self._layer(name), share.to("cpu", torch.float64)
            self._parameter[layer] += float(now.square().sum())
            self._update[layer] += float((now - self._before[name, start]).square().sum())
        self._before = {}

    def tables(self) -> dict[str, Any]:
        """The tables, and warnings of heads that have gone wrong. A collective."""
        squares = {name: sum(float(total) for total, _ in found) for name, found in self._squares.items()}
        counts = {name: sum(count for _, count in found) for name, found in self._squares.items()}
        sums = all_reduce_sums(
            [*self._parameter.values(), *self._update.values(), *map(float, squares.values()), *counts.values()]
        )
        size, table = len(self._names), dict[str, dict[str, float]]()
        for place, name in enumerate(self._names):
            table[name] = {"parameter_norm": math.sqrt(sums[place]), "update_norm": math.sqrt(sums[size + place])}
        for place, name in enumerate(self._layers):
            total, count = sums[2 * size + place], sums[2 * size + len(self._layers) + place]
            table[name]["activation_rms"] = math.sqrt(total / count) if count else math.nan
        return {"layers": table, **self._attention()}

    def _attention(self) -> dict[str, Any]:
        table, warnings = dict[str, dict[str, float]](), list[str]()
        for name, facts, words in self._heads:
            if not facts:
                continue
            warnings += words
            fractions = [fact.entropy_fraction for fact in facts]
            table[name] = {
                "entropy": statistics.fmean(fact.entropy for fact in facts),
                "entropy_fraction": statistics.fmean(fractions),
                "lowest_entropy_fraction": min(fractions),
                "highest_entropy_fraction": max(fractions),
                "largest_score": max(fact.largest_score for fact in facts),
                "top_share": max(fact.top_share for fact in facts),
            }
        return {"attention": table, "warnings": warnings} if table else {}

    def _masters(self) -> Iterator[tuple[tuple[str, int], Tensor]]:
        """This rank's share by (parameter, first element)."""
        trained = set(self._trained)
        for fragment in self._engine.fragments():
            if fragment.name in trained:
                yield (fragment.name, fragment.start), fragment.tensors[MASTER].detach()

    def _layer(self, parameter: str) -> str:
        """The layer that a parameter is in, or the part of the model outside of the layers."""
        return next((name for name in self._layers if parameter.startswith(name + ".")), parameter.partition(".")[0])

    def _hook(self, name: str) -> Any:
        def take(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
            info = inputs[1]
            hidden_TD = output[0] if isinstance(output, tuple) else output  # with experts, their losses beside
            assert isinstance(info, SeqInfo)
            real = info.num_tokens - (info.lengths[-1] if info.padding else 0)
            x_TD = hidden_TD.detach()[:real]
            self._squares[name].append((x_TD.float().square().sum(dtype=torch.float64), x_TD.numel()))

        return take

    def _observer(self, lengths: Sequence[int]) -> Any:
        document = max(range(len(lengths)), key=lambda place: lengths[place])
        numbers: Counter[str] = Counter()

        @torch.no_grad()
        def take(call: AttentionCall) -> None:
            name = f"{call.kind}.{numbers[call.kind]}"
            numbers[call.kind] += 1
            found = map_of(call, name, document, most_queries=MOST_QUERIES)
            facts = head_facts(found)  # at once: maps of all layers would be large
            self._heads.append((name, facts, warnings_of(found, facts)))

        return take


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of every stack by name, such as `layers.0` or `encoder.layers.3`."""
    stacks = {name: module for name, module in model.named_modules() if isinstance(module, LayerStack)}
    return {f"{name}.{place}": layer for name, stack in stacks.items() for place, layer in enumerate(stack)}
