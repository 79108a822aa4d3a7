"""A down-sampled index beside an attempt's JSON lines, so that a page with long runs need not read them. PURE.

Takes records with their places in the file -> one line for each `BLOCK_RECORDS` of them: where they lie, of each number
the lowest, the highest and the mean, and what the ledger needs. 100,000 records make 782 lines. The index is made from
the lines alone: rank 0 writes it as it goes, a reader rebuilds what is missing, a torn or stale one costs only time.
Own design.
"""

from __future__ import annotations

import itertools
import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic_core import from_json

BLOCK_RECORDS = 128
FORMAT = 1
_LEDGER = ("t", "step", "steps", "step_s", "save_stall_s", "data_wait_s", "rollback_s")
_UNKNOWN = (math.nan, math.nan, 1, math.nan)
_SPARSE = ("layers", "attention")


def index_key(metrics_key: str) -> str:
    """`metrics/attempt-003.jsonl` -> `metrics/attempt-003.index`."""
    return metrics_key.removesuffix(".jsonl") + ".index"


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a step record by dotted name, those of its tables `sources` and `objectives` included."""
    found = {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
    for table in ("sources", "objectives"):
        for row, values in record.get(table, {}).items():
            found |= {f"{table}.{row}.{name}": float(v) for name, v in values.items() if isinstance(v, int | float)}
    return found


@dataclass(slots=True)
class Spread:
    """Lowest, highest and mean of a number over a block, and which of the two came first."""

    low: float
    high: float
    low_first: bool = True
    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        if value < self.low:
            self.low, self.low_first = value, False
        if value > self.high:
            self.high, self.low_first = value, True
        self.total += value
        self.count += 1

    def to_json(self) -> list[float | int]:
        return [_brief(self.low), _brief(self.high), int(self.low_first), _brief(self.total / self.count)]


@dataclass(slots=True)
class IndexBuilder:
    """Gathers records to lines.

    Attributes:
        records: in the block that is not full yet.
        begin: place in the file where it begins.
        end: place behind the last record.
    """

    records: int = 0
    begin: int = 0
    end: int = 0
    _spreads: dict[str, Spread] = field(default_factory=dict)
    _ledger: list[dict[str, Any]] = field(default_factory=list)
    _sparse: list[dict[str, Any]] = field(default_factory=list)
    _own: list[float] = field(default_factory=list)
    _edges: list[dict[str, Any]] = field(default_factory=list)
    _before: int | None = None

    @classmethod
    def after(cls, line: Mapping[str, Any]) -> IndexBuilder:
        """Goes on behind a line."""
        before = line["edges"][-1]["step"] if line["edges"] else None
        return cls(begin=line["end"], end=line["end"], _before=before)

    def add(self, record: Mapping[str, Any], end: int) -> dict[str, Any] | None:
        """Takes the record that ends at byte `end`; gives a line when a block is full."""
        self.end = end
        self.records += 1
        if "validation" in record:
            kept = {name: record[name] for name in ("t", "step", "validation", "validation_s") if name in record}
            self._ledger.append(kept)
        elif "loss" in record:
            self._take_step(record)
        return self._close() if self.records == BLOCK_RECORDS else None

    def _take_step(self, record: Mapping[str, Any]) -> None:
        for name, value in numbers_of(record).items():
            if math.isfinite(value):
                spread = self._spreads.get(name)
                if spread is None:
                    spread = self._spreads[name] = Spread(value, value)
                spread.add(value)
        if any(name in record for name in _SPARSE):
            self._sparse.append({name: record[name] for name in ("t", "step", "tokens", *_SPARSE) if name in record})
        own = record.get("ranks", {}).get("own_s")
        if own:
            same = len(own) == len(self._own)
            self._own = [max(pair) for pair in zip(own, self._own, strict=True)] if same else list(own)
        edge = {name: record[name] for name in ("step", "t", "tokens") if isinstance(record.get(name), int | float)}
        self._edges = [self._edges[0], edge] if self._edges else [edge]
        self._merge(record)

    def _merge(self, record: Mapping[str, Any]) -> None:
        """Puts a step record into the ledger's rows: together with the one before where both tell of steps alone."""
        row = {name: record[name] for name in _LEDGER if record.get(name) is not None} | {"loss": 0}
        known = row["step"] - self._before if self._before is not None else None
        self._before = int(row["step"])
        plain = not row.get("save_stall_s") and not row.get("rollback_s") and row.get("steps", known) == known
        last = self._ledger[-1] if self._ledger else None
        if not plain or known is None or known <= 0 or last is None or not last.get("plain"):
            self._ledger.append(row | ({"plain": True, "steps": known} if plain and known else {}))
            return
        steps = last["steps"] + known
        for name in ("step_s", "data_wait_s"):
            last[name] = (last["steps"] * float(last.get(name) or 0.0) + known * float(row.get(name) or 0.0)) / steps
        last |= {"t": row.get("t", last.get("t")), "step": row["step"], "steps": steps}

    def _close(self) -> dict[str, Any]:
        line = {
            "format": FORMAT,
            "begin": self.begin,
            "end": self.end,
            "edges": self._edges,
            "fields": {name: spread.to_json() for name, spread in self._spreads.items()},
            "ledger": [{name: v for name, v in row.items() if name != "plain"} for row in self._ledger],
            "sparse": self._sparse,
            "own_s": self._own,
        }
        self.records, self.begin, self._spreads = 0, self.end, {}
        self._ledger, self._sparse, self._own, self._edges = [], [], [], []
        return line


def encode_line(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def decode_index(data: bytes, size: int) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of an index that fit a file of `size` bytes, each beginning where the one before ends, and the
    bytes of the index that they take. What is torn, of another format or of another file ends it."""
    lines: list[dict[str, Any]] = []
    used = 0
    for text in data.split(b"\n")[:-1]:
        try:
            line = from_json(text, cache_strings="keys")  # 3.6 times faster than json's, which was most of a page
        except ValueError:
            break
        begins = lines[-1]["end"] if lines else 0
        if not isinstance(line, dict) or line.get("format") != FORMAT or line.get("begin") != begins:
            break
        if line["end"] > size:
            break
        lines.append(line)
        used += len(text) + 1
    return lines, used


def columns_of(lines: Sequence[Mapping[str, Any]]) -> tuple[dict[str, array[float]], dict[str, array[float]]]:
    """(two rows for each block: of each number the lowest and the highest, in their order; one row with the means).

    All blocks at once, by field: row by row it took most of the time of opening a page.
    """
    extremes: dict[str, array[float]] = {}
    means: dict[str, array[float]] = {}
    names = list(dict.fromkeys(itertools.chain.from_iterable(line["fields"] for line in lines)))
    spreads = itertools.chain.from_iterable(line["fields"].get(name, _UNKNOWN) for line in lines for name in names)
    # One array of all: an array for each field, out of lists, took five times as long.
    table = np.fromiter(spreads, dtype=np.float64, count=4 * len(lines) * len(names)).reshape(len(lines), len(names), 4)
    for place, name in enumerate(names):
        spread = table[:, place]
        low_first = spread[:, 2:3] > 0
        extremes[name] = _array(np.where(low_first, spread[:, :2], spread[:, 1::-1]))
        means[name] = _array(spread[:, 3])
    for name in ("step", "t", "tokens"):
        ends = np.array([[line["edges"][at].get(name, math.nan) for at in (0, -1)] for line in lines], dtype=np.float64)
        extremes[name], means[name] = _array(ends), _array(ends.mean(axis=1))
    return extremes, means


def _array(values: np.ndarray[Any, np.dtype[np.float64]]) -> array[float]:
    """What can grow, as an array of numpy cannot."""
    grown = array("d")
    grown.frombytes(values.tobytes())
    return grown


def _brief(value: float) -> float:
    """Nine digits are more than a picture shows."""
    return float(f"{value:.9g}")
