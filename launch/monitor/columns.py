"""Numbers of records by field, and what ranks did over time. Memory: 8 bytes a number, bounded for ranks."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_MOST_ROWS = 512  # of a heat map


@dataclass(slots=True)
class Columns:
    """The step records of one attempt, by field; a value that a record lacks is NaN."""

    length: int = 0
    fields: dict[str, array[float]] = field(default_factory=dict)

    def add(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if isinstance(value, int | float):
                column = self.fields.get(name)
                if column is None:
                    column = self.fields[name] = array("d", [math.nan]) * self.length
                column.append(value)
        self.length += 1
        for column in self.fields.values():
            if len(column) < self.length:
                column.append(math.nan)


@dataclass(slots=True)
class RankHistory:
    """Own work of every rank over time, as a heat map shows it: at most 512 rows, of neighbours the longer.

    Attributes:
        steps: last step of each row.
        own_s: [rows][ranks].
    """

    steps: list[int] = field(default_factory=list)
    own_s: list[list[float]] = field(default_factory=list)

    def add(self, step: int, own_s: Sequence[float]) -> None:
        if self.own_s and len(own_s) != len(self.own_s[-1]):
            self.steps, self.own_s = [], []  # another number of ranks is another map
        self.steps.append(step)
        self.own_s.append(list(own_s))
        if len(self.steps) > _MOST_ROWS:
            pairs = range(0, len(self.steps) - 1, 2)
            kept = [[max(two) for two in zip(self.own_s[at], self.own_s[at + 1], strict=True)] for at in pairs]
            odd = len(self.steps) % 2
            self.own_s = [*kept, *self.own_s[len(self.own_s) - odd :]]
            self.steps = [*(self.steps[at + 1] for at in pairs), *self.steps[len(self.steps) - odd :]]
