"""The data state: position, skips, quarantine, segments, and its JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pretrain.data.segments import Span, step_spans
from pretrain.data.state import (
    DataState,
    Segment,
    SegmentSource,
    Skip,
)
from pretrain.errors import DataError

SEGMENT = Segment(
    0, 8, 2, 2, 2, 16, 16, None, (SegmentSource("a", "0" * 64, 1.0, 5, 4), SegmentSource("b", "1" * 64, 0.5, 3, 4))
)
START = DataState(next_row=0, seed=7, segments=(SEGMENT,))


def through_json(state: DataState) -> DataState:
    return DataState.from_json(json.loads(json.dumps(state.to_json())))


def test_a_state_survives_json_and_stays_small() -> None:
    state = START.advance(8).with_skip(24, 50).with_quarantine([("b", 2), ("a", 1)])
    state = state.advance(8).advance(8).with_segment(replace(SEGMENT, global_batch_size=12))
    assert through_json(state) == state
    assert state.next_row == 50
    assert state.segments[1].first_row == 50
    many = state.with_quarantine([("a", i) for i in range(20)])
    assert len(json.dumps(many.to_json())) < 4096


def test_advance_counts_rows_and_jumps_over_skips_that_touch_each_other() -> None:
    state = START.with_skip(16, 20).with_skip(24, 40)
    assert state.step_rows == range(8)
    state = state.advance(8)
    assert state.step_rows == range(8, 16)
    state = state.advance(8)
    assert state.step_rows == range(20, 28)
    with pytest.raises(DataError, match=r"data\.skips=\[24, 40\) begins inside the step of rows \[20, 28\)"):
        state.advance(8)
    touching = replace(START, skips=(Skip(8, 12), Skip(12, 30)))
    assert touching.advance(8).next_row == 30


def test_a_skip_at_the_present_takes_effect_at_once() -> None:
    assert START.advance(8).with_skip(8, 31).next_row == 31


@pytest.mark.parametrize("skip", [(0, 8), (12, 20), (16, 16), (16, 10)])
def test_a_skip_in_the_past_off_a_boundary_or_empty_is_refused(skip: tuple[int, int]) -> None:
    with pytest.raises(DataError, match="begins at a step boundary"):
        START.advance(8).with_skip(*skip)


def test_quarantine_keeps_the_row_at_which_a_block_was_first_found() -> None:
    first = START.advance(8).with_quarantine([("a", 3)])
    again = first.advance(8).with_quarantine([("a", 3), ("a", 1)])
    assert [(q.source, q.block, q.from_row) for q in again.quarantine] == [("a", 3, 8), ("a", 1, 16)]
    assert again.with_quarantine([("a", 1)]) is again


def test_a_new_segment_replaces_one_that_begins_at_the_same_row() -> None:
    state = START.advance(8).with_segment(replace(SEGMENT, global_batch_size=4))
    state = state.with_segment(replace(SEGMENT, global_batch_size=16))
    assert [(s.first_row, s.global_batch_size) for s in state.segments] == [(0, 8), (8, 16)]
    assert START.with_segment(replace(SEGMENT, global_batch_size=16)).segments[0].global_batch_size == 16


def test_steps_know_their_rows_through_skips_and_batch_sizes() -> None:
    state = START.advance(8).with_skip(24, 50)
    spans = step_spans(state)
    assert [span[:4] for span in spans] == [(0, 0, 3, 8), (3, 50, None, 8)]
    later = state.advance(8).advance(8).advance(8).with_segment(replace(SEGMENT, global_batch_size=4))
    assert later.next_row == 58
    assert [span[:4] for span in step_spans(later)] == [(0, 0, 3, 8), (3, 50, 1, 8), (4, 58, None, 4)]
    assert step_spans(START.with_skip(0, 24)) == [Span(0, 24, None, 8, SEGMENT)]


def broken(**changes: Any) -> dict[str, Any]:
    body = json.loads(json.dumps(START.to_json()))
    for name, value in changes.items():
        if value is None:
            del body[name]
        else:
            body[name] = value
    return body


@pytest.mark.parametrize(
    "body",
    [
        broken(next_row=-1),
        broken(next_row="8"),
        broken(next_row=True),
        broken(segments=[]),
        broken(segments=None),
        broken(skips=[{"first_row": 9, "end_row": 9}]),
        broken(quarantine=[{"source": "a"}]),
        broken(segments=[{**json.loads(json.dumps(START.to_json()))["segments"][0], "first_row": 4}]),
    ],
)
def test_a_damaged_state_is_named_as_such(body: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="data state of the checkpoint is damaged"):
        DataState.from_json(body)


def test_a_state_of_another_format_is_refused() -> None:
    with pytest.raises(DataError, match="data state format=1 is not known"):
        DataState.from_json(broken(format=1))
