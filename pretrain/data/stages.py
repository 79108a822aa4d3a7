"""The segments of a whole run, planned before it starts: marks of the config, caps of epochs, skipped rows. PURE.

Takes how rows are read, the config's stages, caps and skips, and where the run stands -> gives the segments, past and
to come.

Invariants: what is past is never changed; planning again from any step of a planned run gives the same plan; a cap is
never exceeded (a source rests from the first step in which a lane could exceed it, so at most one global batch of its
rows is left); every segment begins where a step does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from pretrain.config.batches import BATCH_FIELDS
from pretrain.config.schema import RunConfig, StageConfig
from pretrain.data.rows import SourceRows
from pretrain.data.segments import consumed_before, segment_of, step_spans
from pretrain.data.state import DataState, Segment, Skip
from pretrain.errors import DataError


@dataclass(frozen=True, slots=True)
class Stage:
    """From step `step` on, or from the first step after `tokens` token slots, what is not None holds; the rest stays as
    it was. Sources without a weight rest."""

    weights: tuple[tuple[str, float], ...] | None = None
    step: int | None = None
    tokens: int | None = None
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    sequence_length: int | None = None


class _Setting(NamedTuple):
    """What holds from a stage on: the segment's shape, and weights by source."""

    base: Segment
    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a config asks for.

    Attributes:
        base: how rows are read before the first stage, with every source that the run knows and its weight there.
        stages: in the order of their marks.
        max_epochs: by source name; those that are not here have no end.
        skips: rows that are jumped over.
        total_steps: horizon of the plan.
    """

    base: Segment
    stages: tuple[Stage, ...] = ()
    max_epochs: tuple[tuple[str, float], ...] = ()
    skips: tuple[Skip, ...] = ()
    total_steps: int = 1


def plan_of(config: RunConfig, sources: Sequence[SourceRows], row_tokens: int | None = None) -> Plan:
    """All that a config says of the segments of its run; `row_tokens` as for `segment_of`."""
    data = config.data
    return Plan(
        base=segment_of(config, sources, row_tokens),
        stages=tuple(_stage(stage) for stage in data.stages),
        max_epochs=tuple((name, s.max_epochs) for name, s in data.sources.items() if s.max_epochs is not None),
        skips=tuple(Skip(first, end) for first, end in data.skip_rows),
        total_steps=config.schedule.total_steps,
    )


def _stage(stage: StageConfig) -> Stage:
    weights = None if stage.weights is None else tuple(stage.weights.items())
    shape = {name: getattr(stage, name) for name in BATCH_FIELDS}
    return Stage(weights, stage.from_step, stage.from_tokens, **shape)


def plan_run(plan: Plan, state: DataState) -> DataState:
    """The state with all segments up to the end of the run, from its own position on.

    Raises:
        DataError: marks that do not ascend, a stage of unknown sources, a skip that begins inside a step, or all
            sources at their cap before the end.
    """
    past = tuple(segment for segment in state.segments if segment.first_row < state.next_row)
    step = step_at(replace(state, segments=past)) if past else 0
    if past and step >= plan.total_steps:
        return state
    skips = {skip for skip in state.skips if skip.first_row < state.next_row}
    skips |= {skip for skip in plan.skips if skip.first_row >= state.next_row}
    at = replace(state, segments=past, skips=tuple(sorted(skips, key=lambda skip: skip.first_row)))
    settings = _settings(plan)
    marks = _marks(plan, settings, state, step)
    begun = sum(mark <= step for mark in marks)
    begin = _next_row(state.next_row, 0, settings[begun].base.rows_per_step, at.skips)
    at = replace(at, next_row=begin)
    while True:
        until = min([*marks[begun : begun + 1], plan.total_steps])
        at, step = _read_until(plan, settings[begun], at, step, until)
        if step >= plan.total_steps:
            return replace(at, next_row=begin)
        begun += 1


def step_at(state: DataState) -> int:
    """The optimizer step that begins at `state.next_row`."""
    for span in reversed(step_spans(replace(state, segments=state.started))):
        if span.first_row <= state.next_row:
            return span.first_step + (state.next_row - span.first_row) // span.rows_per_step
    return 0


def tokens_before(state: DataState) -> int:
    """Token slots of all steps before `state.next_row`."""
    step, total = step_at(state), 0
    for span in step_spans(replace(state, segments=state.started)):
        steps = step - span.first_step if span.num_steps is None else min(span.num_steps, step - span.first_step)
        total += max(steps, 0) * span.segment.slots_per_step
    return total


def _step_behind(state: DataState, tokens: int) -> int:
    """The first step of those read with at least `tokens` token slots before it."""
    before = 0
    for span in step_spans(replace(state, segments=state.started)):
        slots = span.segment.slots_per_step
        steps = -(-(tokens - before) // slots)
        if span.num_steps is None or steps <= span.num_steps:
            return span.first_step + max(steps, 0)
        before += span.num_steps * slots
    return 0


def _settings(plan: Plan) -> list[_Setting]:
    """What holds before the first stage, then from each of them on."""
    known = {source.name: source.weight for source in plan.base.sources}
    found = [_Setting(plan.base, known)]
    for number, stage in enumerate(plan.stages):
        unknown = sorted({name for name, _ in stage.weights or ()} - known.keys())
        if unknown:
            raise DataError(
                f"data.stages.{number}.weights.{unknown[0]} is no source. A stage weighs sources of the run "
                f"({', '.join(sorted(known))}). Add it under data.sources, or correct the name."
            )
        shape = {name: getattr(stage, name) for name in BATCH_FIELDS if getattr(stage, name) is not None}
        weights = found[-1].weights if stage.weights is None else dict(stage.weights)
        found.append(_Setting(replace(found[-1].base, **shape), weights))
    return found


def _marks(plan: Plan, settings: Sequence[_Setting], state: DataState, step: int) -> list[int]:
    """The step at which each stage begins: exact for the past; those to come by what holds before them."""
    now = tokens_before(state)
    tokens, marks, at = now, list[int](), step
    for stage, before in zip(plan.stages, settings, strict=False):
        if stage.step is not None:
            mark = stage.step
        elif (stage.tokens or 0) <= now:
            mark = _step_behind(state, stage.tokens or 0)
        else:
            mark = at + -(-((stage.tokens or 0) - tokens) // before.base.slots_per_step)
        marks.append(mark)
        if mark > at:
            tokens, at = tokens + (mark - at) * before.base.slots_per_step, mark
    if sorted(set(marks)) != marks:
        raise DataError(
            f"data.stages begin at steps {', '.join(map(str, marks))}. Each begins after the one before it. Put them "
            "in order, and no two at one step."
        )
    return marks


def _read_until(plan: Plan, setting: _Setting, at: DataState, step: int, until: int) -> tuple[DataState, int]:
    """Appends the segments of one stage; a source at its cap ends one."""
    weights, size = setting.weights, setting.base.rows_per_step
    while step < until:
        names = _within_caps(plan, size, at, sorted(weights))
        if not names:
            raise DataError(
                f"data.sources hold no row for step {step} of schedule.total_steps={plan.total_steps}: all of "
                f"{', '.join(sorted(weights))} have reached their max_epochs. A run never exceeds a cap. "
                f"Set schedule.total_steps={step} or less, raise a max_epochs, or add data."
            )
        sources = tuple(replace(s, weight=weights[s.name]) for s in plan.base.sources if s.name in names)
        segment = replace(setting.base, sources=sources, first_row=at.next_row if at.segments else 0)
        if not at.segments or replace(at.segments[-1], first_row=segment.first_row) != segment:
            at = replace(at, segments=(*at.segments, segment))
        low, high = step + 1, until  # the first step at which a source has to rest lies in low..high
        while low < high:
            middle = (low + high) // 2
            row = _next_row(at.next_row, middle - step, size, at.skips)
            if len(_within_caps(plan, size, replace(at, next_row=row), names)) < len(names):
                high = middle
            else:
                low = middle + 1
        at, step = replace(at, next_row=_next_row(at.next_row, low - step, size, at.skips)), low
    return at, step


def _within_caps(plan: Plan, size: int, at: DataState, names: Sequence[str]) -> list[str]:
    """Those of `names` of which no lane can exceed its cap in the next step of `size` rows."""
    caps = dict(plan.max_epochs)
    if not caps.keys() & set(names):
        return list(names)
    taken = consumed_before(at.segments, at.seed, at.next_row)
    most = -(-size // plan.base.lanes)
    shapes = {source.name: source for source in plan.base.sources}
    kept = []
    for name in names:
        lane_epoch = shapes[name].num_blocks * shapes[name].rows_per_block // plan.base.lanes
        used = int(taken[name].max()) if name in taken else 0
        if name not in caps or used + most <= int(Fraction(str(caps[name])) * lane_epoch):
            kept.append(name)
    return kept


def _next_row(row: int, steps: int, size: int, skips: Sequence[Skip]) -> int:
    """The row at which a step begins that is `steps` steps after `row`. Raises DataError where a skip begins in one."""
    for skip in skips:
        if skip.end_row <= row:
            continue
        if skip.first_row < row:
            row = skip.end_row
            continue
        whole, rest = divmod(skip.first_row - row, size)
        if whole > steps or (whole == steps and rest):
            break
        if rest:
            raise DataError(
                f"data.skip_rows=[{skip.first_row}, {skip.end_row}) begins inside a step. A skip begins where a step "
                f"does: at {skip.first_row - rest} or {skip.first_row - rest + size}. Move its beginning."
            )
        row, steps = skip.end_row, steps - whole
    return row + steps * size
