"""An `Inspection` as a picture: a map for each head of the chosen layers, and the entropy of all heads."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pretrain.generate.attention import Inspection
from pretrain.metrics.attention_plot import EntropyGrid, HeadPicture, draw_attention


def last_layers(found: Inspection) -> list[str]:
    """The last layer of each kind (decoder, encoder, cross)."""
    names = [item.name for item in found.maps]
    return list({name.partition(".")[0]: name for name in names}.values())


def draw_inspection(title: str, found: Inspection, layers: Sequence[str]) -> bytes:
    """A PNG."""
    heads = [
        HeadPicture(f"{item.name} head {head}", item.weights[head].numpy(), *found.labels(item))
        for name in layers
        for item in found.maps
        if item.name == name
        for head in range(item.weights.shape[0])
    ]
    return draw_attention(title, _entropies(found), heads)


def _entropies(found: Inspection) -> EntropyGrid:
    known = {(fact.layer, fact.head): fact.entropy_fraction for fact in found.facts}
    return EntropyGrid(
        [item.name for item in found.maps],
        [[known.get((item.name, head), math.nan) for head in range(item.weights.shape[0])] for item in found.maps],
    )
