"""Fill in the middle: some documents are rearranged so that their middle comes last. PURE.

Takes a row's documents -> gives a `PackedRow` of next-token prediction. Two cuts, uniform over the borders of
the text tokens, make prefix, middle and suffix (each may be empty), written as
    PSM  <prefix> P <suffix> S <middle> M end        SPM  <prefix> <suffix> S <middle> P M end
so that the end stands behind the middle: it says that the gap is filled. Labels that are markers are
ignored, for where a cut lies cannot be known and whoever asks writes them. Source: Bavarian et al. 2022 (SPM in
its second form, which is trained jointly), with the cuts at tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pretrain.data.objective import I64, Ids, PackedRow
from pretrain.data.objective_tasks import Piece, pieces
from pretrain.data.random_stream import uniforms
from pretrain.data.special_tokens import FimMarkers
from pretrain.sequence import IGNORED_LABEL


@dataclass(frozen=True, slots=True)
class FimRule:
    """Who is rearranged and how.

    Attributes:
        rate: of the documents with at least `shortest` text tokens.
        spm_rate: of those, as suffix, prefix, middle.
        end_id: stands behind the middle.
    """

    rate: float
    spm_rate: float
    shortest: int
    markers: FimMarkers
    end_id: int


def fill_in_the_middle_row(ids: Ids, ends: I64, num_real: int, rule: FimRule, key: int) -> PackedRow:
    """Predict the next token in documents some of which are rearranged. Arguments as of `causal_lm_row`."""
    draws = uniforms(key, 4 * num_real).reshape(4, num_real)
    read, labels, lengths = [], [], []
    for piece in pieces(ids, ends, num_real):
        chance = draws[:, piece.start]
        if piece.body.size >= rule.shortest and chance[0] < rule.rate:
            document = rearranged(piece.body, rule, spm=bool(chance[1] < rule.spm_rate), cuts=(chance[2], chance[3]))
            targets = np.append(document[1:], IGNORED_LABEL)
            targets[np.isin(targets, (rule.markers.prefix, rule.markers.suffix, rule.markers.middle))] = IGNORED_LABEL
        else:
            document, targets = _as_it_is(piece)
        read.append(document)
        labels.append(targets)
        lengths.append(document.size)
    nothing = np.zeros(0, dtype=np.int64)
    return PackedRow(
        decoder_ids=np.concatenate([nothing, *read]),
        labels=np.concatenate([nothing, *labels]),
        lengths=np.array(lengths, dtype=np.int64),
    )


def rearranged(body: I64, rule: FimRule, *, spm: bool, cuts: tuple[float, float]) -> I64:
    """One document: markers and parts in their order, and the end.

    Args:
        cuts: two uniform numbers, which choose the borders in either order.
    """
    first, second = sorted(int(cut * (body.size + 1)) for cut in cuts)
    prefix, middle, suffix = body[:first], body[first:second], body[second:]
    mark = rule.markers
    if spm:
        parts = [[mark.prefix, mark.suffix], suffix, [mark.middle], prefix, middle, [rule.end_id]]
    else:
        parts = [[mark.prefix], prefix, [mark.suffix], suffix, [mark.middle], middle, [rule.end_id]]
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])


def _as_it_is(piece: Piece) -> tuple[I64, I64]:
    if piece.end_id is None:
        return piece.body, np.append(piece.body[1:], piece.tail)
    document = np.append(piece.body, piece.end_id)
    return document, np.append(document[1:], IGNORED_LABEL)
