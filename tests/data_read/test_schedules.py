"""Batch sizes and row lengths that change in mid-run, at step and token marks, against a loop that remembers sets."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.config import config_from_dict
from pretrain.data.batch import sum_digests
from pretrain.data.explain import explain_step
from pretrain.data.forecast import forecast
from pretrain.data.loader import Loader, open_loader
from pretrain.data.rows import open_sources
from pretrain.data.segments import order_of
from pretrain.data.stages import Plan, Stage, plan_of, plan_run, tokens_before
from pretrain.data.state import DataState, Segment, SegmentSource
from pretrain.data.tokenizer import train_bpe
from pretrain.errors import ConfigError, DataError
from pretrain.topology import World
from tests.data_read.corpus import (
    BYTE_LENGTHS,
    PAD,
    PAIR_CHANGES,
    random_documents,
    random_pairs,
    run_config,
    write_pairs,
    write_tokenizer_file,
    write_tokens,
)

STEPS = 40
LONGEST = 64  # tokens of a global row in the plans
plans = st.builds(
    dict,
    blocks=st.dictionaries(st.sampled_from("abc"), st.integers(1, 7), min_size=1),
    stages=st.lists(
        st.tuples(
            st.integers(1, 12),  # steps after the mark before it
            st.booleans(),  # at tokens
            st.sampled_from([None, 8, 16, 24, 40]),
            st.sampled_from([None, 16, 32, 64]),
            st.sampled_from([None, 1, 2, 3]),  # which sources
        ),
        max_size=5,
    ),
    lanes=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 2**40),
)


class Reference:
    """The plain loop: marks, batches and lengths kept by hand."""

    def __init__(self, drawn: dict[str, Any]) -> None:
        self.names = sorted(drawn["blocks"])
        self.stages: list[Stage] = []
        self.by_step: list[tuple[int, int, frozenset[str], int]] = []  # batch, length, sources, tokens before
        batch, length, sources, tokens, step = 8, 16, frozenset(self.names), 0, 0
        for gap, by_tokens, new_batch, new_length, chosen in drawn["stages"]:
            for _ in range(gap):
                self.by_step.append((batch, length, sources, tokens))
                tokens, step = tokens + batch * length, step + 1
            weights = None
            if chosen is not None:
                sources = frozenset(self.names[:chosen])
                weights = tuple((name, 1.0 + number) for number, name in enumerate(sorted(sources)))
            batch, length = new_batch or batch, new_length or length
            mark = {"tokens": tokens - 3} if by_tokens else {"step": step}
            self.stages.append(Stage(weights, global_batch_size=new_batch, sequence_length=new_length, **mark))
        while len(self.by_step) < STEPS:
            self.by_step.append((batch, length, sources, tokens))
            tokens += batch * length
        self.by_step = self.by_step[:STEPS]

    def plan(self, drawn: dict[str, Any], stages: list[Stage]) -> Plan:
        sources = tuple(SegmentSource(name, f"hash-{name}", 1.0, drawn["blocks"][name], 4) for name in self.names)
        base = Segment(0, 8, 8, drawn["lanes"], 1, 16, LONGEST, None, sources)
        return Plan(base, tuple(stages), total_steps=STEPS)


def pieces_of(state: DataState) -> list[tuple[str, int, int, int, int]]:
    """(source, epoch, block, first token, tokens) of each row of the next step, as the loader reads them."""
    segment, length = state.segment, state.segment.sequence_length
    places = order_of(state.started, state.seed).locate_range(state.next_row, segment.rows_per_step)
    found = []
    for place in places:
        for part in range(segment.parts):
            name, first = segment.sources[place.source].name, (place.row * segment.parts + part) * length
            found.append((name, place.epoch, place.block, first, length))
    return found


@settings(derandomize=True, deadline=None, max_examples=20)
@given(drawn=plans)
def test_a_schedule_equals_a_loop_that_counts_tokens_and_remembers_what_was_read(drawn: dict[str, Any]) -> None:
    reference = Reference(drawn)
    state = plan_run(reference.plan(drawn, reference.stages), DataState(0, drawn["seed"], ()))
    read: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for batch, length, sources, tokens in reference.by_step:
        segment = state.segment
        assert (segment.global_batch_size, segment.sequence_length) == (batch, length)
        assert {source.name for source in segment.sources} == sources
        assert tokens_before(state) == tokens
        for name, epoch, block, first, size in pieces_of(state):
            read[name] += [(epoch, block, first + k) for k in range(0, size, 16)]
        state = state.advance(segment.rows_per_step)
    for name, found in read.items():
        assert len(set(found)) == len(found), name  # no 16 tokens twice in an epoch, whatever was changed
        whole = {(e, b, t) for e in range(max(e for e, _, _ in found)) for b in range(drawn["blocks"][name])
                 for t in range(0, 4 * LONGEST, 16)}  # fmt: skip
        if drawn["lanes"] == 1:  # one lane ends an epoch before it begins another
            assert whole <= set(found)


@settings(derandomize=True, deadline=None, max_examples=15)
@given(drawn=plans)
def test_a_changed_batch_or_length_cuts_the_same_sequence(drawn: dict[str, Any]) -> None:
    reference = Reference({**drawn, "stages": [(*stage[:4], None) for stage in drawn["stages"]]})
    sequences = []
    for stages in (reference.stages, []):
        state, tokens = plan_run(reference.plan(drawn, stages), DataState(0, drawn["seed"], ())), []
        for _ in range(STEPS):
            for name, epoch, block, first, size in pieces_of(state):
                tokens += [(name, epoch, block, first + k) for k in range(0, size, 16)]
            state = state.advance(state.segment.rows_per_step)
        sequences.append(tokens)
    shorter = min(map(len, sequences))
    assert sequences[0][:shorter] == sequences[1][:shorter]


@settings(derandomize=True, deadline=None, max_examples=15)
@given(drawn=plans, at=st.integers(0, STEPS - 1))
def test_planning_again_from_any_step_of_a_schedule_gives_the_same_plan(drawn: dict[str, Any], at: int) -> None:
    reference = Reference(drawn)
    plan = reference.plan(drawn, reference.stages)
    state = plan_run(plan, DataState(0, drawn["seed"], ()))
    for _ in range(at):
        state = state.advance(state.segment.rows_per_step)
    state = DataState.from_json(json.loads(json.dumps(state.to_json())))
    assert plan_run(plan, state) == state


# ------------------------------------------------------------------------------------- through the loader

STAGES = [
    {"from_step": 2, "global_batch_size": 12, "sequence_length": 16},
    {"from_tokens": 2 * 8 * 8 + 2 * 12 * 16, "sequence_length": 32, "micro_batch_size": 1, "global_batch_size": 6},
    {"from_step": 7, "weights": {"a": 1}, "sequence_length": 8, "global_batch_size": 16},
]
SHAPES = [(8, 8, 2)] * 2 + [(12, 16, 2)] * 2 + [(6, 32, 1)] * 3 + [(16, 8, 1)] * 3  # batch, length, micro-batch by step


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("schedules")
    tokenizer = write_tokenizer_file(root)
    for name, seed in (("a", 1), ("b", 2)):
        write_tokens(root / name, random_documents(150, 14, seed), tokenizer)
    return root


def scheduled(root: Path, **changes: Any) -> Any:
    sources = {"a": (root / "a", 0.7), "b": (root / "b", 0.3)}
    changes = {"batch__sequence_length": 8, "data__stages": STAGES, **changes}
    return run_config(root / "tokenizer.json", sources, **changes)


def ids(steps: list[Any]) -> list[int]:
    """What is read, without padding, which micro-batches of other sizes hold elsewhere."""
    return [i for data in steps for batch in data.batches for i in batch.decoder_ids.tolist() if i != PAD]


def read_from(loader: Loader, state: DataState, first: int, count: int) -> tuple[list[Any], DataState]:
    found = []
    for step in range(first, first + count):
        found.append(loader.read(step, state))
        state = loader.next_state(state)
    return found, state


@pytest.mark.parametrize("objective", ["causal_lm", "prefix_lm"])
def test_any_ranks_and_any_stop_read_the_same_schedule(root: Path, objective: str) -> None:
    config = scheduled(root, objective__kind=objective)
    with open_loader(config, BYTE_LENGTHS, World()) as loader:
        whole, _ = read_from(loader, loader.initial_state(), 0, 10)
    shapes = [
        (len(d.batches) * d.batches[0].decoder_ids.numel() // s, s, d.batches[0].decoder_ids.numel() // s)
        for d, (_, s, _) in zip(whole, SHAPES, strict=True)
    ]
    assert shapes == SHAPES
    for ranks in (3, 16) if objective == "causal_lm" else (3,):
        parts = []
        for rank in range(ranks):
            with open_loader(config, BYTE_LENGTHS, World(rank, ranks, rank, ranks)) as loader:
                parts.append(read_from(loader, loader.initial_state(), 0, 10)[0])
        for step, data in enumerate(whole):
            assert sum_digests(part[step].digest for part in parts) == data.digest
            assert {len(part[step].batches) for part in parts} == {-(-len(data.batches) // ranks)}
    for stop in (1, 2, 5, 8) if objective == "causal_lm" else (5,):
        with open_loader(config, BYTE_LENGTHS, World()) as loader:
            _, state = read_from(loader, loader.initial_state(), 0, stop)
        with open_loader(config, BYTE_LENGTHS, World()) as loader:
            state = DataState.from_json(json.loads(json.dumps(state.to_json())))
            assert loader.resume(state) is state
            rest, _ = read_from(loader, state, stop, 10 - stop)
        assert [data.digest for data in rest] == [data.digest for data in whole[stop:]]


def test_the_text_of_a_schedule_is_that_of_the_longest_rows_cut_in_parts(root: Path) -> None:
    """Ids of all steps in row order, against rows of 32 that are read at that length alone."""
    with open_loader(scheduled(root), BYTE_LENGTHS, World()) as loader:
        mixed, _ = read_from(loader, loader.initial_state(), 0, 7)
    long = {"batch__sequence_length": 32, "batch__global_batch_size": 4, "data__stages": []}
    with open_loader(scheduled(root, **long), BYTE_LENGTHS, World()) as loader:
        plain, _ = read_from(loader, loader.initial_state(), 0, 8)

    assert len(ids(mixed)) > 900
    assert ids(mixed)[: len(ids(plain))] == ids(plain)[: len(ids(mixed))]


def test_a_resume_may_shorten_rows_and_change_the_batch_but_not_lengthen_them(root: Path) -> None:
    plain = {"data__stages": [], "batch__sequence_length": 32}
    with open_loader(scheduled(root, **plain), BYTE_LENGTHS, World()) as loader:
        whole, _ = read_from(loader, loader.initial_state(), 0, 6)
        _, state = read_from(loader, loader.initial_state(), 0, 2)
    shorter = {**plain, "batch__sequence_length": 16, "batch__global_batch_size": 12}
    with open_loader(scheduled(root, **shorter), BYTE_LENGTHS, World()) as loader:
        resumed = loader.resume(state)
        assert [(s.first_row, s.row_tokens, s.rows_per_step) for s in resumed.segments] == [(0, 32, 8), (16, 32, 6)]
        rest, _ = read_from(loader, resumed, 2, 4)
    assert ids(rest) == ids(whole[2:5])
    with open_loader(scheduled(root, **{**plain, "batch__sequence_length": 16}), BYTE_LENGTHS, World()) as loader:
        _, state = read_from(loader, loader.initial_state(), 0, 2)
    message = r"batch\.sequence_length=32 is not the checkpoint's 16, nor a part of it"
    longer = scheduled(root, **plain)
    with open_loader(longer, BYTE_LENGTHS, World()) as loader, pytest.raises(DataError, match=message):
        loader.resume(state)


def test_the_plan_and_explain_follow_the_schedule(root: Path, tmp_path: Path) -> None:
    texts = [f"document {i} says {'many ' * (i % 9)}words, number {i * 7919}." for i in range(120)]
    tokenizer = train_bpe(texts, 300)
    tokenizer.save(tmp_path / "tokenizer.json")
    for name in ("a", "b"):
        documents = [[*row.tolist(), tokenizer.eos_id] for row in tokenizer.encode_batch(texts)]
        write_tokens(tmp_path / name, documents, tmp_path / "tokenizer.json")
    config = scheduled(tmp_path)
    sources = tuple(open_sources(config, "sources").values())
    state = plan_run(plan_of(config, sources), DataState(0, config.seed, ()))
    found = forecast(config, sources, state, ranks=4)
    assert [(s.first_step, s.rows_per_step, s.sequence_length) for s in found.segments] == [
        (0, 8, 8), (2, 12, 16), (4, 6, 32), (7, 16, 8),
    ]  # fmt: skip
    assert [round(s.idle_fraction, 3) for s in found.segments] == [0, 0.25, 0.25, 0]
    assert found.tokens == sum(batch * length for batch, length, _ in SHAPES)
    with open_loader(config, tokenizer.byte_lengths(), World()) as loader:
        assert "from step 4: a 7 of 10 rows, b 3 of 10 rows; 6 rows of 32 tokens a step in micro-batches of 1" in (
            loader.describe()
        )
        assert "└─ step: at first 64 token slots a step, 1,472 in the run" in loader.describe()
        steps, _ = read_from(loader, loader.initial_state(), 0, 10)
    for step, data in enumerate(steps):
        rows = explain_step(config, step)
        assert len(rows) == rows[0].rows_in_step == SHAPES[step][0]
        for batch in data.batches:
            mine = [row for row in rows if row.micro_batch == batch.index]
            parts, at = [part for row in mine for part in row.documents], 0
            assert list(batch.decoder_info.lengths[: len(parts)]) == [part.num_tokens for part in parts]
            for part in parts:
                assert part.text == tokenizer.decode(batch.decoder_ids[at : at + part.num_tokens].tolist())
                at += part.num_tokens
        assert explain_step(config, step, most_rows=3) == rows[:3]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"from_step": 1, "global_batch_size": 7}], r"stages\.0\.global_batch_size=7 is not a multiple of .*=2"),
        ([{"from_step": 1, "micro_batch_size": 3}], r"stages\.0\.global_batch_size=8 is not a multiple"),
        ([{"from_step": 1, "sequence_length": 12}], r"batch\.sequence_length=8 does not divide 12, the longest"),
        (
            [{"from_step": 1, "sequence_length": 32}, {"from_step": 2, "sequence_length": 8, "global_batch_size": 6}],
            r"data\.stages\.1: 6 rows of 8 tokens are 1\.5 rows of 32.*Set data\.stages\.1\.global_batch_size to a "
            r"multiple of 4",
        ),
        ([{"from_step": 1}], r"data\.stages\.0 changes nothing"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(root: Path, stages: list[Any], message: str) -> None:
    body = scheduled(root).model_dump(mode="json")
    body["data"]["stages"] = stages
    with pytest.raises(ConfigError, match=message):
        config_from_dict(body)


def test_pairs_and_sources_that_hold_too_little_refuse_a_schedule_by_name(root: Path, tmp_path: Path) -> None:
    tokenizer = write_tokenizer_file(tmp_path)
    write_pairs(tmp_path / "pairs", random_pairs(60, 8, 3), tokenizer)
    body = run_config(tokenizer, {"p": tmp_path / "pairs"}, **PAIR_CHANGES).model_dump(mode="json")
    body["data"]["stages"] = [{"from_step": 1, "sequence_length": 8}]
    with pytest.raises(ConfigError, match=r"data\.stages change sequence_length with batch\.source_length set"):
        config_from_dict(body)
    body["data"]["stages"] = [{"from_step": 1, "global_batch_size": 4}]
    with open_loader(config_from_dict(body), BYTE_LENGTHS, World()) as loader:
        steps, _ = read_from(loader, loader.initial_state(), 0, 3)
    assert [len(data.batches) for data in steps] == [4, 2, 2]
    with pytest.raises(DataError, match=r"data\.stages\.0\.global_batch_size=400 is more than"):
        open_loader(scheduled(root, data__stages=[{"from_step": 1, "global_batch_size": 400}]), BYTE_LENGTHS, World())


def test_a_long_ramp_is_planned_fast_enough_to_finish(root: Path) -> None:
    """300 stages that change batch and weights by turns: orders are made once each, not for every one behind."""
    stages = [
        {"from_step": 1 + n, "global_batch_size": 8 + 4 * (n % 5)} if n % 2 else
        {"from_step": 1 + n, "weights": {"a": 1 + n % 7, "b": 1}}
        for n in range(300)
    ]  # fmt: skip
    config = scheduled(root, data__stages=stages, schedule__total_steps=400)
    with open_loader(config, BYTE_LENGTHS, World()) as loader:
        assert len(loader.initial_state().segments) == 301
