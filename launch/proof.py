"""What `pretrain prove` decides, without processes or files: when to kill whom, and what is equal. PURE.

Takes a seed → planned kills; takes the records of two runs → comparisons. Equal means the same bits:
numbers are compared as they were written, with no tolerance.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pretrain.errors import UserError

_INSIDE = ("rank", "ranks", "agent")  # in turn: what is killed below a controller that lives on
Records = Mapping[int, Sequence[Mapping[str, Any]]]  # attempt -> its records in order


@dataclass(frozen=True, slots=True)
class PlannedKill:
    """One kill.

    Attributes:
        step: fires once this many steps are done in the attempt that runs then.
        step_fraction: and this share of a step later, so that it hits anything: forward, reduction, save.
        rank: the rank to kill, or whose agent; None means the whole `pretrain train` process.
        kind: `rank`, `ranks` (all of them at once), `agent`, or `train`.
    """

    step: int
    step_fraction: float
    rank: int | None
    kind: str = "rank"

    @property
    def target(self) -> str:
        if self.rank is None:
            return "pretrain train"
        return {"ranks": "all ranks", "agent": f"agent of rank {self.rank}"}.get(self.kind, f"rank {self.rank}")


def plan_kills(count: int, *, total_steps: int, num_ranks: int, seed: int) -> list[PlannedKill]:
    """Kills at random moments after the first step and before the last tenth: the whole process and parts by turns.

    The last tenth (one step at least) stays free, because a kill must find the run alive.

    Raises:
        UserError: fewer than one kill, or a run too short to be killed between two steps that often.
    """
    if count < 1:
        raise UserError(f"--kills={count} proves nothing. At least one kill is needed. Set --kills 1 or more.")
    moments = range(1, total_steps - max(1, total_steps // 10))
    if len(moments) < count:
        raise UserError(
            f"--kills={count} do not fit into schedule.total_steps={total_steps}. Each kill needs a step of its own "
            f"after the first and before the last tenth. Set schedule.total_steps={2 * count + 2}, or fewer kills."
        )
    draw = random.Random(seed)
    steps = sorted(draw.sample(moments, count))
    whole_first = draw.random() < 0.5
    kills = []
    for i, step in enumerate(steps):
        rank, fraction = draw.randrange(num_ranks), draw.random()
        if (i % 2 == 0) == whole_first:
            kills.append(PlannedKill(step, fraction, None, "train"))
        else:
            kills.append(PlannedKill(step, fraction, rank, _INSIDE[i // 2 % len(_INSIDE)]))
    return kills


@dataclass(frozen=True, slots=True)
class Comparison:
    """One thing compared between the untouched run and the killed one."""

    what: str
    untouched: str
    killed: str
    equal: bool


def compare_records(untouched: Records, killed: Records, total_steps: int) -> list[Comparison]:
    """Loss, gradient norm and data digest of every step; also of the steps that a restore repeated.

    A step that one of the runs has no record of makes the comparison unequal. A run may do a step more than once by
    itself, where it goes back and jumps over rows: a repeated record must be one of those of the untouched run.
    """
    reference, known = _by_step(untouched), _all_by_step(untouched)
    final = _by_step(killed)
    repeated = [
        record for record in _step_records(killed) if record["step"] in final and record is not final[record["step"]]
    ]
    comparisons = []
    for field, name in (("loss", "loss"), ("gradient_norm", "gradient norm"), ("data_digest", "data digest")):
        wrong = [
            step
            for step in range(1, total_steps + 1)
            if step not in reference or step not in final or not _same(reference[step], final[step], field)
        ]
        first = wrong[0] if wrong else total_steps
        comparisons.append(
            Comparison(
                f"{name}, {total_steps} steps"
                if not wrong
                else f"{name}, step {first} ({len(wrong)} of {total_steps})",
                _show(reference.get(first, {}), field),
                _show(final.get(first, {}), field),
                not wrong,
            )
        )
        if repeated:
            differing = [r for r in repeated if not any(_same(own, r, field) for own in known.get(r["step"], []))]
            shown = differing[0] if differing else repeated[-1]
            comparisons.append(
                Comparison(
                    f"{name}, {len(repeated)} repeated steps"
                    if not differing
                    else f"{name}, repeated step {shown['step']} ({len(differing)} of {len(repeated)})",
                    _show(reference.get(shown["step"], {}), field),
                    _show(shown, field),
                    not differing,
                )
            )
    return comparisons


def _step_records(attempts: Records) -> list[Mapping[str, Any]]:
    return [record for records in attempts.values() for record in records if "validation" not in record]


def _by_step(attempts: Records) -> dict[int, Mapping[str, Any]]:
    """The record that counts for each step: the latest attempt's."""
    return {record["step"]: record for record in _step_records(attempts)}


def _all_by_step(attempts: Records) -> dict[int, list[Mapping[str, Any]]]:
    found: dict[int, list[Mapping[str, Any]]] = {}
    for record in _step_records(attempts):
        found.setdefault(record["step"], []).append(record)
    return found


def _same(one: Mapping[str, Any], other: Mapping[str, Any], field: str) -> bool:
    return field in one and field in other and bool(one[field] == other[field])


def _show(record: Mapping[str, Any], field: str) -> str:
    if field not in record:
        return "missing"
    return "not finite" if record[field] is None else str(record[field])
