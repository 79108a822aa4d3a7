"""How a run mixes its sources up to a row: shares against the plan, epochs. PURE.

Takes a data state and the order of its rows -> gives numbers by source, by the names of `SOURCE_FIELDS`. From the order
alone: no counting, so every rank knows them without a word and a resume changes nothing.
"""

from __future__ import annotations

from pretrain.data.order import RowOrder
from pretrain.data.state import DataState, Segment


def started_before(after: DataState) -> tuple[Segment, ...]:
    """The segments up to that of the step before `after`."""
    return tuple(segment for segment in after.segments if segment.first_row < max(1, after.next_row))


def shares_of(after: DataState, order: RowOrder) -> dict[str, dict[str, float]]:
    """Of the segment that the step before `after` belongs to; sources that it does not read are left out.

    Args:
        order: of `started_before`. Sources whose rows nobody has counted (raw tars) have no epochs.
    """
    segment = started_before(after)[-1]
    before, taken = (
        {name: int(rows.sum()) for name, rows in order.consumed(row).items()}
        for row in (segment.first_row, after.next_row)
    )
    rows = {name: taken[name] - before[name] for name in taken}
    weights = sum(source.weight for source in segment.sources)
    found = {}
    for source in segment.sources:
        share = rows[source.name] / max(1, sum(rows.values()))
        found[source.name] = {"share": share, "planned_share": source.weight / weights}
        if source.rows_per_block:
            found[source.name]["epochs"] = taken[source.name] / (source.num_blocks * source.rows_per_block)
    return found
