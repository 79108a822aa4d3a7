"""Stages, caps, skips and new sources: planned before the run, against a plain loop that remembers sets."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.config.load import load_config
from pretrain.data.forecast import forecast, row_of_step, rows_taken, shares
from pretrain.data.loader import Loader, open_loader
from pretrain.data.rows import open_sources
from pretrain.data.segments import order_of
from pretrain.data.stages import Plan, Stage, plan_of, plan_run, step_at, tokens_before
from pretrain.data.state import DataState, Segment, SegmentSource, Skip
from pretrain.errors import ConfigError, DataError
from pretrain.topology import World
from tests.data_read.corpus import BYTE_LENGTHS, EOS, run_config, write_tokenizer_file, write_tokens


def base(blocks: dict[str, int], *, size: int = 8, lanes: int = 4, rows: int = 4) -> Segment:
    sources = tuple(SegmentSource(name, f"hash-{name}", 1.0, count, rows) for name, count in sorted(blocks.items()))
    return Segment(0, size, 1, lanes, 1, 16, 16, None, sources)


def fresh(seed: int = 3) -> DataState:
    return DataState(next_row=0, seed=seed, segments=())


def addresses(state: DataState, steps: int) -> list[list[tuple[str, int, int, int]]]:
    """(source, epoch, block, row) of every row of every step, as the loader would read them."""
    found = []
    for _ in range(steps):
        segment, order = state.segment, order_of(state.started, state.seed)
        places = order.locate_range(state.next_row, segment.global_batch_size)
        found.append([(segment.sources[p.source].name, p.epoch, p.block, p.row) for p in places])
        state = state.advance(segment.global_batch_size)
    return found


plans = st.builds(
    dict,
    blocks=st.dictionaries(st.sampled_from("abc"), st.integers(1, 7), min_size=1),
    stages=st.lists(st.tuples(st.integers(0, 40), st.booleans(), st.integers(1, 7), st.integers(1, 5)), max_size=3),
    cap=st.none() | st.integers(2, 5),
    skips=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 30)), max_size=2),
    size=st.sampled_from([4, 8, 12]),
    lanes=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 2**40),
)


def plan_from(drawn: dict[str, Any], total_steps: int) -> Plan:
    names = sorted(drawn["blocks"])
    stages, used = [], set()
    for step, by_tokens, mask, weight in sorted(drawn["stages"]):
        chosen = [name for number, name in enumerate(names) if mask >> number & 1] or names
        weights = tuple((name, float(weight + number)) for number, name in enumerate(chosen))
        if step not in used:
            used.add(step)
            slots = step * drawn["size"] * 16
            stages.append(Stage(weights, tokens=slots) if by_tokens else Stage(weights, step=step))
    skips, row = [], 0
    for steps, length in drawn["skips"]:
        first = row + (steps + 1) * drawn["size"]
        skips.append(Skip(first, first + length))
        row = first + length
    caps = {names[0]: float(drawn["cap"])} if drawn["cap"] and len(names) > 1 else {}
    segment = base(drawn["blocks"], size=drawn["size"], lanes=drawn["lanes"])
    return Plan(segment, tuple(stages), tuple(caps.items()), tuple(skips), total_steps)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(drawn=plans)
def test_a_planned_run_equals_a_loop_that_remembers_what_every_lane_has_read(drawn: dict[str, Any]) -> None:
    plan = plan_from(drawn, total_steps=50)
    try:
        start = plan_run(plan, fresh(drawn["seed"]))
    except DataError:  # all sources of a stage are at their cap: see below
        assert plan.max_epochs
        return
    shapes = {s.name: s for s in plan.base.sources}
    marks = {0: {s.name for s in plan.base.sources}}
    for stage in plan.stages:
        step = stage.step if stage.step is not None else -(-stage.tokens // (plan.base.global_batch_size * 16))
        marks[step] = {name for name, _ in stage.weights}
    caps, state = dict(plan.max_epochs), start
    read: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    jumped = set()
    for skip in plan.skips:
        jumped |= set(range(skip.first_row, skip.end_row))
    row = 0
    for step in range(50):
        while row in jumped:  # what a skip jumps over counts as read, so that rows keep their numbers
            row += 1
        assert state.next_row == row
        assert step_at(state) == step
        assert tokens_before(state) == step * plan.base.global_batch_size * 16
        names = {s.name for s in state.segment.sources}
        wanted = marks[max(mark for mark in marks if mark <= step)]
        assert names <= wanted
        for resting in wanted - names:  # only a source at its cap rests
            assert resting in caps
        for name, epoch, block, place in addresses(state, 1)[0]:
            read[name].append((epoch, block, place))
        row += plan.base.global_batch_size
        state = state.advance(plan.base.global_batch_size)
    for name, found in read.items():
        assert len(set(found)) == len(found), name  # no row twice in an epoch, whatever the segments
        if name in caps:
            epoch_rows = shapes[name].num_blocks * shapes[name].rows_per_block
            assert len(found) <= caps[name] * epoch_rows
            assert max(epoch for epoch, _, _ in found) < caps[name]
        if not plan.skips:
            assert rows_taken(start, 50 * plan.base.global_batch_size)[name] == len(found)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(drawn=plans, at=st.integers(0, 49))
def test_planning_again_from_any_step_gives_the_same_plan(drawn: dict[str, Any], at: int) -> None:
    plan = plan_from(drawn, total_steps=50)
    try:
        state = plan_run(plan, fresh(drawn["seed"]))
    except DataError:
        return
    for _ in range(at):
        state = state.advance(plan.base.global_batch_size)
    state = DataState.from_json(json.loads(json.dumps(state.to_json())))
    assert plan_run(plan, state) == state


def test_a_lane_goes_on_at_its_next_row_and_finishes_the_epoch_before_it_begins_another() -> None:
    """Three changes of the mixture within one epoch of a: each row of that epoch comes once, and none is left."""
    blocks = {"a": 6, "b": 50}
    stages = (Stage((("a", 1.0),), step=3), Stage((("b", 1.0),), step=5), Stage((("a", 3.0), ("b", 1.0)), step=7))
    state = plan_run(Plan(base(blocks, size=4), stages, total_steps=40), fresh())
    assert [s.first_row for s in state.segments] == [0, 12, 20, 28]
    first_epoch: Counter[tuple[int, int]] = Counter()
    lanes: dict[int, list[int]] = defaultdict(list)
    for step in addresses(state, 40):
        for lane, (name, epoch, block, row) in enumerate(step):
            if name == "a":
                lanes[lane].append(epoch)
                first_epoch[block, row] += epoch == 0
    assert set(first_epoch.values()) == {1}
    assert len(first_epoch) == 6 * 4
    assert all(epochs == sorted(epochs) for epochs in lanes.values())


def test_a_capped_source_is_never_exceeded_and_leaves_less_than_a_global_batch() -> None:
    plan = Plan(base({"a": 3, "b": 90}, size=8), max_epochs=(("a", 2.0),), total_steps=40)
    state = plan_run(plan, fresh())
    taken = rows_taken(state, row_of_step(state, 40))
    assert 2 * 12 - 8 < taken["a"] <= 2 * 12
    assert taken["a"] + taken["b"] == 40 * 8
    assert [len(s.sources) for s in state.segments] == [2, 1]


def test_data_that_ends_before_the_run_is_told_before_it_begins() -> None:
    plan = Plan(base({"a": 3}, size=8), max_epochs=(("a", 2.0),), total_steps=40)
    with pytest.raises(DataError, match=r"hold no row for step 3 of schedule\.total_steps=40: all of a have reached"):
        plan_run(plan, fresh())
    assert plan_run(replace(plan, total_steps=3), fresh()).segments


def test_marks_out_of_order_and_skips_inside_a_step_are_refused() -> None:
    two = (Stage((("a", 1.0),), step=9), Stage((("a", 2.0),), tokens=128))
    with pytest.raises(DataError, match=r"data\.stages begin at steps 9, 1\. .* Put them in order"):
        plan_run(Plan(base({"a": 3}), two, total_steps=20), fresh())
    with pytest.raises(DataError, match=r"data\.skip_rows=\[12, 20\) begins inside a step\. .* at 8 or 16"):
        plan_run(Plan(base({"a": 3}), skips=(Skip(12, 20),), total_steps=20), fresh())


# ------------------------------------------------------------------------------------- through the loader


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stages")
    tokenizer = write_tokenizer_file(root)
    for name, first in (("a", 100), ("b", 150), ("new", 200)):
        write_tokens(root / name, [[first + k, *[50] * 14, EOS] for k in range(32)], tokenizer)
    return root


def config_of(root: Path, sources: dict[str, Any], **changes: Any) -> Any:
    return run_config(root / "tokenizer.json", {n: (root / n, w) for n, w in sources.items()}, **changes)


def ids(loader: Loader, state: DataState, first: int, count: int) -> tuple[list[list[int]], DataState]:
    """The number at the head of each row, by step."""
    found = []
    for step in range(first, first + count):
        data = loader.read(step, state)
        found.append([int(i) for batch in data.batches for i in batch.decoder_ids[::16]])
        state = loader.next_state(state)
    return found, state


STAGES = [{"from_step": 2, "weights": {"b": 1}}, {"from_tokens": 4 * 8 * 16, "weights": {"a": 1, "b": 3}}]


def test_stages_of_the_config_are_read_the_same_after_a_resume_anywhere(root: Path) -> None:
    config = config_of(root, {"a": 1, "b": 1}, data__stages=STAGES, data__skip_rows=[[40, 45]])
    with open_loader(config, BYTE_LENGTHS, World()) as loader:
        whole, _ = ids(loader, loader.initial_state(), 0, 8)
        assert all(150 <= i < 200 for step in whole[2:4] for i in step)
        assert sum(i < 150 for step in whole[4:] for i in step) == 8
        seen = Counter(i for step in whole for i in step if i >= 150)
        assert max(seen.values()) - min(seen.values()) <= 1  # 44 rows of b: each once, some twice
    for stop in range(1, 8):
        with open_loader(config, BYTE_LENGTHS, World()) as loader:
            begun, state = ids(loader, loader.initial_state(), 0, stop)
        with open_loader(config, BYTE_LENGTHS, World()) as loader:
            state = DataState.from_json(json.loads(json.dumps(state.to_json())))
            assert loader.resume(state) is state
            rest, _ = ids(loader, state, stop, 8 - stop)
        assert begun + rest == whole


def test_a_new_source_in_mid_run_begins_there_and_the_others_go_on(root: Path) -> None:
    with open_loader(config_of(root, {"a": 1, "b": 1}), BYTE_LENGTHS, World()) as loader:
        begun, state = ids(loader, loader.initial_state(), 0, 3)
    with open_loader(config_of(root, {"a": 1, "b": 1, "new": 2}), BYTE_LENGTHS, World()) as loader:
        state = loader.resume(state)
        assert [s.first_row for s in state.segments] == [0, 24]
        rest, _ = ids(loader, state, 3, 7)
    seen = Counter(i for step in begun + rest for i in step)
    assert sum(i >= 200 for step in rest for i in step) == 28
    assert max(seen.values()) == 1  # 80 rows of 96: none twice


def test_a_moved_source_goes_on_and_other_content_at_the_same_path_is_refused(root: Path, tmp_path: Path) -> None:
    import shutil

    config = config_of(root, {"a": 1, "b": 1})
    with open_loader(config, BYTE_LENGTHS, World()) as loader:
        whole, _ = ids(loader, loader.initial_state(), 0, 6)
        _, state = ids(loader, loader.initial_state(), 0, 3)
    shutil.copytree(root / "a", tmp_path / "elsewhere")
    moved = run_config(root / "tokenizer.json", {"a": (tmp_path / "elsewhere", 1), "b": (root / "b", 1)})
    with open_loader(moved, BYTE_LENGTHS, World()) as loader:
        assert loader.resume(state) is state
        assert ids(loader, state, 3, 3)[0] == whole[3:]
    other = run_config(root / "tokenizer.json", {"a": (root / "new", 1), "b": (root / "b", 1)})
    with open_loader(other, BYTE_LENGTHS, World()) as loader, pytest.raises(DataError, match="a holds other data"):
        loader.resume(state)


def test_the_forecast_counts_what_the_loader_reads(root: Path) -> None:
    config = config_of(root, {"a": 1, "b": 1}, data__stages=STAGES, data__skip_rows=[[40, 45]])
    sources = tuple(open_sources(config, "sources").values())
    state = plan_run(plan_of(config, sources), DataState(0, config.seed, ()))
    found = forecast(config, sources, state, ranks=2)
    with open_loader(config, BYTE_LENGTHS, World()) as loader:
        whole, _ = ids(loader, loader.initial_state(), 0, 10)
    counts = Counter("a" if i < 150 else "b" for step in whole for i in step)
    assert (found.steps, found.rows, found.tokens) == (10, 80, 80 * 16)
    assert sum(s.rows for s in found.sources) == 85  # the 5 that are jumped over are used up too
    assert abs(found.sources[0].rows - counts["a"]) <= 5
    assert [s.first_step for s in found.segments] == [0, 2, 4]
    assert found.segments[2].quotas == {"a": 1, "b": 3}
    parts = shares(state, 10, 5)
    assert parts[0] == (0, 2, {"a": 0.5, "b": 0.5})
    assert parts[1] == (2, 4, {"a": 0.0, "b": 1.0})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("stages: [{weights: {a: 1}}]", r"data\.stages\.0 has no mark"),
        ("stages: [{from_step: 1, from_tokens: 5, weights: {a: 1}}]", r"data\.stages\.0 has two marks"),
        ("stages: [{from_step: 1, weights: {c: 1}}]", r"data\.stages\.0\.weights\.c is no source\. .*\(a\)"),
        ("skip_rows: [[8, 8]]", r"data\.skip_rows=\[\[8, 8\]\] do not ascend"),
        ("skip_rows: [[16, 24], [0, 8]]", r"do not ascend"),
    ],
)
def test_a_config_with_a_wrong_stage_or_skip_is_refused(root: Path, tmp_path: Path, data: str, message: str) -> None:
    import yaml

    body = config_of(root, {"a": 1}).model_dump(mode="json", exclude_defaults=True)
    body["data"] |= yaml.safe_load(data)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(body))
    with pytest.raises(ConfigError, match=message):
        load_config(path)
