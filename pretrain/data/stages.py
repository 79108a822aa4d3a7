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

from pretrain.config.schema import RunConfig
from pretrain.data.rows import SourceRows
from pretrain.data.segments import consumed_before, segment_of, step_spans
from pretrain.data.state import DataState, Segment, Skip
from pretrain.errors import DataError


@dataclass(frozen=True, slots=True)
class Stage:
    """From step `step` on, or from the first step after `tokens` token slots, the sources named are read by `weights`;
    the others rest."""

    weights: tuple[tuple[str, float], ...]
    step: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a config asks for.

    Attributes:
        base: how rows are read, with every source that the run knows and its weight before the first stage.
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


def plan_of(config: RunConfig, sources: Sequence[SourceRows]) -> Plan:
    """All that a config says of the segments of its run."""
    data = config.data
    return Plan(
        base=segment_of(config, sources),
        stages=tuple(Stage(tuple(s.weights.items()), s.from_step, s.from_tokens) for s in data.stages),
        max_epochs=tuple((name, s.max_epochs) for name, s in data.sources.items() if s.max_epochs is not None),
        skips=tuple(Skip(first, end) for first, end in data.skip_rows),
        total_steps=config.schedule.total_steps,
    )


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
    begin = _next_row(state.next_row, 0, plan.base.global_batch_size, at.skips)
    at = replace(at, next_row=begin)
    marks = _marks(plan, at, step)
    while True:
        stage = [mark for mark in marks if mark[0] <= step]
        weights = stage[-1][1] if stage else {s.name: s.weight for s in plan.base.sources}
        later = [mark[0] for mark in marks if mark[0] > step]
        until = min([*later, plan.total_steps])
        at, step = _read_until(plan, at, weights, step, until)
        if step >= plan.total_steps:
            return replace(at, next_row=begin)


def step_at(state: DataState) -> int:
    """The optimizer step that begins at `state.next_row`."""
    for span in reversed(step_spans(replace(state, segments=state.started))):
        if span.first_row <= state.next_row:
            return span.first_step + (state.next_row - span.first_row) // span.global_batch_size
    return 0


def tokens_before(state: DataState) -> int:
    """Token slots of all steps before `state.next_row`."""
    lengths = {segment.first_row: segment.sequence_length for segment in state.started}
    total = 0
    for segment in state.started:
        rows = [range(s.first_row, s.end_row) for s in state.skips]
        later = [other.first_row for other in state.started if other.first_row > segment.first_row]
        end = min([*later, state.next_row])
        jumped = sum(max(0, min(r.stop, end) - max(r.start, segment.first_row)) for r in rows)
        total += max(0, end - segment.first_row - jumped) * lengths[segment.first_row]
    return total


def _marks(plan: Plan, state: DataState, step: int) -> list[tuple[int, dict[str, float]]]:
    """(step, weights) of each stage."""
    slots = plan.base.global_batch_size * plan.base.sequence_length
    known = {source.name for source in plan.base.sources}
    before, marks = tokens_before(state), []
    for number, stage in enumerate(plan.stages):
        unknown = sorted({name for name, _ in stage.weights} - known)
        if unknown:
            raise DataError(
                f"data.stages.{number}.weights.{unknown[0]} is no source. A stage weighs sources of the run "
                f"({', '.join(sorted(known))}). Add it under data.sources, or correct the name."
            )
        # Steps before the position are exact; those to come have the batch size that the config has now.
        at = step - (before - (stage.tokens or 0)) // slots if stage.step is None else stage.step
        marks.append((max(at, 0), dict(stage.weights)))
    steps = [at for at, _ in marks]
    if sorted(set(steps)) != steps:
        raise DataError(
            f"data.stages begin at steps {', '.join(map(str, steps))}. Each begins after the one before it. Put them "
            "in order, and no two at one step."
        )
    return marks


def _read_until(
    plan: Plan, at: DataState, weights: Mapping[str, float], step: int, until: int
) -> tuple[DataState, int]:
    """Appends the segments of one stage; a source at its cap ends one."""
    size = plan.base.global_batch_size
    while step < until:
        names = _within_caps(plan, at, sorted(weights))
        if not names:
            raise DataError(
                f"data.sources hold no row for step {step} of schedule.total_steps={plan.total_steps}: all of "
                f"{', '.join(sorted(weights))} have reached their max_epochs. A run never exceeds a cap. "
                f"Set schedule.total_steps={step} or less, raise a max_epochs, or add data."
            )
        sources = tuple(replace(s, weight=weights[s.name]) for s in plan.base.sources if s.name in names)
        segment = replace(plan.base, sources=sources, first_row=at.next_row if at.segments else 0)
        if not at.segments or replace(at.segments[-1], first_row=segment.first_row) != segment:
            at = replace(at, segments=(*at.segments, segment))
        low, high = step + 1, until  # the first step at which a source has to rest lies in low..high
        while low < high:
            middle = (low + high) // 2
            row = _next_row(at.next_row, middle - step, size, at.skips)
            if len(_within_caps(plan, replace(at, next_row=row), names)) < len(names):
                high = middle
            else:
                low = middle + 1
        at, step = replace(at, next_row=_next_row(at.next_row, low - step, size, at.skips)), low
    return at, step


def _within_caps(plan: Plan, at: DataState, names: Sequence[str]) -> list[str]:
    """Those of `names` of which no lane can exceed its cap in the next step."""
    caps = dict(plan.max_epochs)
    if not caps.keys() & set(names):
        return list(names)
    taken = consumed_before(at.segments, at.seed, at.next_row)
    most = -(-plan.base.global_batch_size // plan.base.lanes)
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
