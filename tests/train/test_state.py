"""The training state counts what happened and survives JSON."""

from __future__ import annotations

import json

from pretrain.data.state import DataState, Segment, SegmentSource
from pretrain.train.state import TrainingState


def _data(next_row: int) -> DataState:
    source = SegmentSource("text", "0" * 64, weight=1.0, num_blocks=2, rows_per_block=32)
    return DataState(next_row=next_row, seed=3, segments=(Segment(0, 8, 2, 4, 2, 32, 32, None, (source,)),))


def test_steps_tokens_and_skips_are_counted():
    state = TrainingState(step=0, data=_data(0))
    for applied in (True, False, False):
        state = state.after(_data(state.data.next_row + 8), target_tokens=100, applied=applied)
    assert (state.step, state.tokens, state.skipped_steps, state.consecutive_skips) == (3, 300, 2, 2)
    state = state.after(_data(32), target_tokens=50, applied=True)
    assert (state.step, state.tokens, state.skipped_steps, state.consecutive_skips) == (4, 350, 2, 0)
    assert state.data.next_row == 32


def test_the_state_survives_json():
    state = TrainingState(5, _data(40), tokens=10**15, skipped_steps=2, consecutive_skips=1)
    assert TrainingState.from_json(json.loads(json.dumps(state.to_json()))) == state
