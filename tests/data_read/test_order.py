"""The order of rows: every row once per epoch, exact shares, against a simulation with plain lists."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.order import RowOrder, SourceShape, largest_deficit_schedule, mixing_quotas
from pretrain.data.permutation import derive_key, mix_keys, permute
from pretrain.errors import DataError


def permutation(size: int, base: int, *values: int) -> list[int]:
    key = mix_keys(np.array([base], dtype=np.uint64), *(np.array([value]) for value in values))
    return permute(np.arange(size), size, np.repeat(key, size)).tolist()


def lane_epoch(shape: SourceShape, seed: int, lanes: int, window: int, epoch: int) -> list[list[tuple[int, int]]]:
    """(block, row) of one epoch for every lane, dealt out as a person would."""
    rows = shape.rows_per_block
    keys = {p: derive_key("pretrain row order 1", seed, shape.name, p) for p in ("blocks", "windows", "leftover")}
    blocks = permutation(shape.num_blocks, keys["blocks"], epoch)
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(lanes)]
    group = 0
    while len(blocks) >= lanes * window:
        for lane in range(lanes):
            mine, blocks = blocks[:window], blocks[window:]
            pool = [(block, row) for block in mine for row in range(rows)]
            dealt[lane] += [pool[i] for i in permutation(len(pool), keys["windows"], epoch, group, lane)]
        group += 1
    pool = [(block, row) for block in blocks for row in range(rows)]
    for place, i in enumerate(permutation(len(pool), keys["leftover"], epoch) if pool else []):
        dealt[place % lanes].append(pool[i])
    return dealt


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 3), st.sampled_from([1.0, 2.0, 3.0, 0.5])), min_size=1, max_size=3
    ),
    lanes=st.sampled_from([1, 2, 4, 8]),
    window=st.integers(1, 3),
    seed=st.integers(0, 2**62),
)
def test_the_order_equals_a_simulation_with_plain_lists(
    shapes: list[tuple[int, int, float]], lanes: int, window: int, seed: int
) -> None:
    sources = [SourceShape(f"s{i}", n, b * lanes, w) for i, (n, b, w) in enumerate(shapes)]
    order = RowOrder(sources, seed, lanes, window)
    weights = [Fraction(str(s.weight)) for s in sources]
    quotas, period = order.quotas, sum(order.quotas)
    assert [Fraction(q, period) for q in quotas] == [w / sum(weights) for w in weights]
    schedule = largest_deficit_schedule(quotas)
    count = 400
    expected: list[tuple[int, int, int, int]] = []
    queues: dict[tuple[int, int], list[tuple[int, int]]] = {}
    epochs: Counter[tuple[int, int]] = Counter()
    turn: Counter[int] = Counter()
    for n in range(count):
        lane = n % lanes
        s = schedule[(turn[lane] + lane * period // lanes) % period]
        turn[lane] += 1
        if not queues.get((s, lane)):
            queues[s, lane] = lane_epoch(sources[s], seed, lanes, window, epochs[s, lane])[lane]
            epochs[s, lane] += 1
        block, row = queues[s, lane].pop(0)
        expected.append((s, epochs[s, lane] - 1, block, row))
    assert [tuple(a) for a in order.locate_range(0, count)] == expected
    assert tuple(order.locate(count - 1)) == expected[-1]
    taken = order.consumed(count)
    for s, source in enumerate(sources):
        assert taken[source.name].sum() == sum(address[0] == s for address in expected)


@pytest.mark.parametrize("num_blocks", [*range(1, 21), 127, 128, 129, 300])
@pytest.mark.parametrize(("rows", "lanes", "window"), [(16, 8, 2), (8, 8, 1), (4, 1, 3)])
def test_one_source_of_any_number_of_blocks_gives_every_row_once_per_epoch(
    num_blocks: int, rows: int, lanes: int, window: int
) -> None:
    order = RowOrder([SourceShape("a", num_blocks, rows)], 3, lanes, window)
    total = num_blocks * rows
    for epoch in (0, 1, 5):
        addresses = order.locate_range(epoch * total, total)
        assert len({(a.block, a.row) for a in addresses}) == total
        assert {a.epoch for a in addresses} == {epoch}


def test_epochs_have_different_orders_that_only_the_seed_decides() -> None:
    shape = [SourceShape("a", 4, 4)]
    first = RowOrder(shape, 1, 2, 2).locate_range(0, 48)
    assert first == RowOrder(shape, 1, 2, 2).locate_range(0, 48)
    epochs = [[(a.block, a.row) for a in first[i : i + 16]] for i in (0, 16, 32)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert RowOrder(shape, 2, 2, 2).locate_range(0, 48) != first


def test_lanes_and_windows_read_each_block_in_one_stretch() -> None:
    order = RowOrder([SourceShape("a", 64, 16)], 1, 4, 2)
    addresses = order.locate_range(0, 64 * 16)
    for lane in range(4):
        mine = [a.block for a in addresses[lane::4]]
        assert all(len(set(mine[i : i + 32])) == 2 for i in range(0, len(mine), 32))


@pytest.mark.parametrize(
    ("weights", "quotas"),
    [
        ((0.7, 0.3), (7, 3)),
        ((1.0, 1.0), (1, 1)),
        ((0.9, 0.1), (9, 1)),
        ((0.5, 0.3, 0.15, 0.05), (10, 6, 3, 1)),
        ((2.0,), (1,)),
    ],
)
def test_shares_are_exact_over_every_period(weights: tuple[float, ...], quotas: tuple[int, ...]) -> None:
    sources = [SourceShape(f"s{i}", 7, 8, w) for i, w in enumerate(weights)]
    order = RowOrder(sources, 1, 4, 2)
    assert order.quotas == quotas
    period_rows = order.period * 4
    counts = Counter(a.source for a in order.locate_range(period_rows * 3, period_rows))
    assert [counts[i] for i in range(len(weights))] == [q * 4 for q in quotas]


def test_no_prefix_of_the_schedule_is_a_row_or_more_away_from_the_shares() -> None:
    for quotas in ((7, 3), (10, 6, 3, 1), (4000, 90, 5, 1), (1,) * 50):
        counts, period = np.zeros(len(quotas)), sum(quotas)
        for k, s in enumerate(largest_deficit_schedule(quotas), start=1):
            counts[s] += 1
            assert (counts - np.array(quotas) * k / period < 1).all()
        assert counts.tolist() == list(quotas)


def test_weights_without_a_short_period_are_rounded_to_4096ths() -> None:
    quotas = mixing_quotas([SourceShape("a", 1, 1, 0.333333), SourceShape("b", 1, 1, 0.666671)])
    assert sum(quotas) == 4096
    assert quotas[0] == pytest.approx(4096 / 3, abs=0.6)


def test_a_weight_too_small_for_one_row_in_4096_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"data\.sources\.tiny\.weight=1e-05 is too small"):
        mixing_quotas([SourceShape("big", 1, 1, 1.0), SourceShape("tiny", 1, 1, 0.00001)])


def test_lanes_that_do_not_divide_a_block_are_refused_with_the_largest_that_do() -> None:
    with pytest.raises(DataError, match=r"data\.lanes=8 does not divide the 12 rows .* Set data\.lanes=4\."):
        RowOrder([SourceShape("a", 3, 12)], 1, 8, 2)


def test_a_change_of_weights_goes_on_behind_the_last_row_of_each_source() -> None:
    before = [SourceShape("a", 8, 8, 3.0), SourceShape("b", 8, 8, 1.0)]
    after = [SourceShape("a", 8, 8, 1.0), SourceShape("b", 8, 8, 2.0), SourceShape("new", 8, 8, 1.0)]
    first = RowOrder(before, 1, 4, 2)
    second = RowOrder(after, 1, 4, 2, first_row=37, consumed=first.consumed(37))
    rows = [(before[a.source].name, a) for a in first.locate_range(0, 37)]
    rows += [(after[a.source].name, a) for a in second.locate_range(37, 150)]
    for name in ("a", "b", "new"):
        seen = [(a.epoch, a.block, a.row) for n, a in rows if n == name]
        assert len(set(seen)) == len(seen)
        alone = RowOrder([SourceShape(name, 8, 8)], 1, 4, 2)
        for lane in range(4):  # each lane reads a source without a hole
            mine = [(a.epoch, a.block, a.row) for i, (n, a) in enumerate(rows) if n == name and i % 4 == lane]
            full = [(a.epoch, a.block, a.row) for a in alone.locate_range(0, 4 * len(mine))[lane::4]]
            assert mine == full
    with pytest.raises(ValueError, match="before the segment"):
        second.locate(36)


def test_addresses_of_far_rows_of_huge_sources_come_at_once() -> None:
    order = RowOrder([SourceShape("a", 10**6 + 3, 1024, 0.6), SourceShape("b", 10**9, 1024, 0.4)], 1, 64, 2)
    addresses = order.locate_range(10**15, 1000)
    assert len(set(addresses)) == 1000
    assert all(0 <= a.row < 1024 and 0 <= a.block < (10**6 + 3, 10**9)[a.source] for a in addresses)


def test_the_order_never_changes() -> None:
    digest = hashlib.sha256()
    for shapes in ([("a", 1, 8, 1.0)], [("prose", 37, 8, 0.7), ("code", 5, 16, 0.3)], [("x", 10**6, 1024, 1.0)]):
        order = RowOrder([SourceShape(*shape) for shape in shapes], 42, 8, 2)
        for first in (0, 10**6):
            digest.update(json.dumps(order.locate_range(first, 500)).encode())
    assert digest.hexdigest() == "178efa6658c62ba0242c55e2ec4bb7835f220c2524715606fe0ee1e969c45eeb"
