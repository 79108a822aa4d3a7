"""Prefix LM, span corruption, UL2 and fill-in-the-middle against their definitions, put back together and counted."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.config.capacity import Noise, most_sentinels, noise_counts, row_capacity
from pretrain.config.schema import (
    BatchConfig,
    FillInTheMiddleObjective,
    PrefixLMObjective,
    SpanCorruptionObjective,
    UL2Objective,
)
from pretrain.data.batch import BatchShape, make_batch
from pretrain.data.objective import PackedRow
from pretrain.data.objective_fim import FimRule, fill_in_the_middle_row
from pretrain.data.objective_prefix import prefix_lm_tasks
from pretrain.data.objective_spans import Corruption, Denoiser, divide, span_tasks
from pretrain.data.objective_tasks import Task, pair_row, prefix_row
from pretrain.data.random_stream import uniforms
from pretrain.data.special_tokens import FimMarkers
from pretrain.sequence import IGNORED_LABEL

EOS, PAD, START = 0, 1, 2
MARKERS = FimMarkers(3, 4, 5)
MODES = {"R": 6, "S": 7, "X": 8}
SENTINELS = np.arange(1000, 1400)
FIRST_TEXT = 10


def row_of(lengths: list[int], cut: bool, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A row full of documents (the end counts in their lengths), the last one cut or not, and the token behind."""
    total = sum(lengths)
    ids = np.random.default_rng(seed).integers(FIRST_TEXT, 900, total + 1)
    ends = np.cumsum(lengths[:-1] if cut else lengths).astype(np.int64)
    ids[ends - 1] = EOS
    return ids, ends


def t5_rule(density: float = 0.15, mean: float = 3.0, shortest: int = 2) -> Corruption:
    return Corruption((Denoiser(Noise(density, mean)),), shortest, SENTINELS, EOS)


def ul2_rule(objective: UL2Objective) -> Corruption:
    denoisers = tuple(
        Denoiser(Noise(d.noise_density, d.mean_span_tokens, d.mode), d.weight, MODES[d.mode])
        for d in objective.denoisers.values()
    )
    return Corruption(denoisers, objective.min_document_tokens, SENTINELS, EOS)


def fim_rule(rate: float = 1.0, spm: float = 0.5, shortest: int = 1) -> FimRule:
    return FimRule(rate, spm, shortest, MARKERS, EOS)


def filled_in(task: Task) -> tuple[list[int], list[int]]:
    """A plain reader of T5's format: the text with every sentinel replaced by its answer, and the lengths of spans."""
    answers: dict[int, list[int]] = {}
    current: list[int] = []
    *answer, last = task.targets.tolist()
    assert last == EOS
    for token in answer:
        if token >= SENTINELS[0]:
            current = answers.setdefault(token, [])
        else:
            current.append(token)
    assert list(answers) == SENTINELS[: len(answers)].tolist()  # they begin anew and follow each other
    text: list[int] = []
    for token in task.inputs.tolist():
        text += answers.pop(token) if token in answers else [token]
    assert not answers
    spans = "".join("|" if token >= SENTINELS[0] else "." for token in answer).split("|")
    return text, [len(span) for span in spans[1:]]


def test_the_hidden_spans_put_back_give_the_document() -> None:
    ids, ends = row_of([30, 2, 5, 1, 40, 22], cut=True)
    tasks = span_tasks(ids, ends, 100, t5_rule(shortest=3), key=4)
    texts = [filled_in(task)[0] for task in tasks]
    documents = [
        ids[a:b].tolist() for a, b in ((0, 30), (32, 37), (38, 78), (78, 100))
    ]  # 1 and 0 text tokens: left out
    assert texts == documents


def test_fifteen_percent_are_hidden_in_spans_of_three_and_every_place_is_as_likely_as_in_t5() -> None:
    body, documents = 200, 400
    ids, ends = row_of([body + 1] * documents, cut=False)
    tasks = span_tasks(ids, ends, ids.size - 1, t5_rule(), key=9)
    lengths = [length for task in tasks for length in filled_in(task)[1]]
    assert sum(lengths) / (body * documents) == 0.15  # exactly: 30 of each
    assert len(lengths) == 10 * documents
    # Uniform divisions of 30 into 10 parts: P(first part = 1) = C(28, 8) / C(29, 9) = 9/29.
    share = Counter(lengths)[1] / len(lengths)
    assert share == pytest.approx(9 / 29, abs=4 * (9 / 29 * 20 / 29 / len(lengths)) ** 0.5)


def test_spans_lie_anywhere_with_a_token_between_any_two() -> None:
    documents = 6000
    ids, ends = row_of([7] * documents, cut=False)  # of 6 text tokens 2 are hidden, in 2 spans of 1
    tasks = span_tasks(ids, ends, ids.size - 1, t5_rule(density=0.3, mean=1.0), key=5)
    places = Counter(tuple(np.flatnonzero(task.inputs >= SENTINELS[0]).tolist()) for task in tasks)
    apart = [(a, b) for a in range(6) for b in range(a + 2, 6)]  # C(5, 2) = 10
    assert sorted(places) == apart
    expected = documents / len(apart)
    assert sum((places[pair] - expected) ** 2 / expected for pair in apart) < 33.7  # 9 degrees: 0.9999 lie below


def test_every_division_is_equally_likely() -> None:
    count = Counter(tuple(divide(7, 3, uniforms(key, 7)).tolist()) for key in range(6000))
    assert set(count) == {parts for parts in itertools.product(range(1, 6), repeat=3) if sum(parts) == 7}
    expected = 6000 / 15
    assert sum((number - expected) ** 2 / expected for number in count.values()) < 42  # 14 degrees: 0.9999 lie below
    assert divide(5, 1, uniforms(1, 5)).tolist() == [5]
    assert divide(4, 4, uniforms(1, 4)).tolist() == [1, 1, 1, 1]


def test_ul2_draws_the_denoisers_by_weight_and_names_them_in_front() -> None:
    objective = UL2Objective.model_validate(
        {
            "denoisers": {
                "r": {"mode": "R", "noise_density": 0.15, "mean_span_tokens": 3, "weight": 2},
                "s": {"mode": "S", "noise_density": 0.25, "weight": 1},
                "x": {"mode": "X", "noise_density": 0.5, "mean_span_tokens": 8, "weight": 1},
            }
        }
    )
    documents = 4000
    ids, ends = row_of([41] * documents, cut=False)
    tasks = span_tasks(ids, ends, ids.size - 1, ul2_rule(objective), key=2)
    modes = Counter(int(task.inputs[0]) for task in tasks)
    for mode, share in (("R", 0.5), ("S", 0.25), ("X", 0.25)):
        assert modes[MODES[mode]] / documents == pytest.approx(share, abs=4 * (share * (1 - share) / documents) ** 0.5)
    hidden = {MODES["R"]: 6, MODES["X"]: 20}
    for number, task in enumerate(tasks):
        document = ids[41 * number : 41 * number + 41].tolist()
        mode = int(task.inputs[0])
        if mode == MODES["S"]:  # the end in one piece, without a sentinel
            assert task.targets.size == 11
            assert [*task.inputs[1:].tolist(), *task.targets.tolist()] == document
        else:
            text, spans = filled_in(Task(task.inputs[1:], task.targets))
            assert text == document
            assert sum(spans) == hidden[mode]


def test_a_prefix_is_uniform_and_the_rest_is_predicted() -> None:
    documents = 6000
    ids, ends = row_of([6] * documents, cut=False)
    tasks = prefix_lm_tasks(ids, ends, ids.size - 1, key=7)
    for number, task in enumerate(tasks):
        assert [*task.inputs, *task.targets] == ids[6 * number : 6 * number + 6].tolist()
    count = Counter(task.inputs.size for task in tasks)
    assert sorted(count) == [1, 2, 3, 4, 5]
    assert sum((number - documents / 5) ** 2 / (documents / 5) for number in count.values()) < 23.5  # 4 degrees
    ids, ends = row_of([1, 4], cut=True)  # an end alone has nothing to give; a cut document goes on behind the row
    (task,) = prefix_lm_tasks(ids, ends, 5, key=1)
    assert [*task.inputs, *task.targets] == ids[1:6].tolist()


def test_rows_of_tasks_by_hand() -> None:
    tasks = [Task(np.array([11, 12]), np.array([21, 22, EOS])), Task(np.array([13]), np.array([EOS]))]
    row = pair_row(tasks, START)
    assert row.encoder_ids is not None
    assert row.encoder_lengths is not None
    assert (row.encoder_ids.tolist(), row.encoder_lengths.tolist()) == ([11, 12, 13], [2, 1])
    assert row.decoder_ids.tolist() == [START, 21, 22, START]
    assert (row.labels.tolist(), row.lengths.tolist()) == ([21, 22, EOS, EOS], [3, 1])
    row = prefix_row(tasks, bidirectional=True)
    assert row.prefix_lengths is not None
    assert row.decoder_ids.tolist() == [11, 12, 21, 22, 13]
    assert row.labels.tolist() == [IGNORED_LABEL, 21, 22, EOS, EOS]
    assert (row.lengths.tolist(), row.prefix_lengths.tolist()) == ([4, 1], [2, 1])
    assert prefix_row(tasks, bidirectional=False).prefix_lengths is None
    for empty in (pair_row([], START), prefix_row([], bidirectional=True)):
        assert empty.decoder_ids.size == empty.labels.size == empty.lengths.size == 0


def middle_put_back(document: list[int]) -> tuple[str, list[int], tuple[int, int]]:
    """A plain reader of both forms: (form, text in its order, border of the middle)."""
    *body, last = document
    assert last == EOS
    if body[1] == MARKERS.suffix and body[0] == MARKERS.prefix and MARKERS.suffix not in body[2:]:
        middle = body.index(MARKERS.middle)
        suffix, rest = body[2:middle], body[middle + 1 :]
        return "spm", [*rest, *suffix], (-1, len(rest))
    assert body[0] == MARKERS.prefix
    at, middle = body.index(MARKERS.suffix), body.index(MARKERS.middle)
    prefix, suffix, inside = body[1:at], body[at + 1 : middle], body[middle + 1 :]
    return "psm", [*prefix, *inside, *suffix], (len(prefix), len(prefix) + len(inside))


def test_the_middle_put_back_gives_the_document_and_markers_are_no_targets() -> None:
    documents = 3000
    ids, ends = row_of([8] * documents, cut=False)
    row = fill_in_the_middle_row(ids, ends, ids.size - 1, fim_rule(spm=0.25), key=3)
    at, forms, borders = 0, Counter[str](), Counter[tuple[int, int]]()
    for number, length in enumerate(row.lengths.tolist()):
        document, labels = row.decoder_ids[at : at + length].tolist(), row.labels[at : at + length].tolist()
        form, text, border = middle_put_back(document)
        assert text == ids[8 * number : 8 * number + 7].tolist()
        forms[form] += 1
        borders[border] += form == "psm"
        markers = {MARKERS.prefix, MARKERS.suffix, MARKERS.middle}
        assert labels == [IGNORED_LABEL if t in markers else t for t in document[1:]] + [IGNORED_LABEL]
        at += length
    # A document whose prefix is empty reads the same in both forms but for the suffix: counted as spm here.
    both_empty_prefix = sum(1 for a, b in itertools.product(range(8), repeat=2) if min(a, b) == 0) / 64
    expected = 0.25 + 0.75 * both_empty_prefix
    assert forms["spm"] / documents == pytest.approx(expected, abs=4 * (0.25 / documents) ** 0.5)
    cut_at = Counter(border[1] for border in borders.elements())
    for place in range(1, 8):  # the larger of two uniform cuts among 7 borders: 2 place - 1 of 49 pairs
        assert cut_at[place] / sum(cut_at.values()) == pytest.approx((2 * place - 1) / 49, abs=0.035)


def test_documents_that_are_not_rearranged_are_those_of_causal_lm() -> None:
    ids, ends = row_of([5, 9, 4], cut=True)
    row = fill_in_the_middle_row(ids, ends, 18, fim_rule(rate=0.0), key=3)
    assert row.decoder_ids.tolist() == ids[:18].tolist()
    expected = ids[1:19].copy()
    expected[[4, 13]] = IGNORED_LABEL
    assert row.labels.tolist() == expected.tolist()
    short = fill_in_the_middle_row(ids, ends, 18, fim_rule(shortest=5), key=3)
    assert short.lengths.tolist() == [5, 12, 4]  # of 4, 8 and 4 text tokens


# ------------------------------------------------------------------------------------------- capacities


def compositions(total: int) -> list[list[int]]:
    """All ordered divisions of `total` into document lengths."""
    if total == 0:
        return [[]]
    return [[first, *rest] for first in range(1, total + 1) for rest in compositions(total - first)]


def sizes(row: PackedRow) -> tuple[int, int]:
    return row.decoder_ids.size, 0 if row.encoder_ids is None else row.encoder_ids.size


def rounded(tokens: int) -> int:
    return (tokens + 7) // 8 * 8


@pytest.mark.parametrize("two_sided", [True, False])
@pytest.mark.parametrize("density", [0.15, 0.5, 0.8])
@pytest.mark.parametrize("shortest", [2, 4])
def test_the_capacity_of_span_corruption_is_the_worst_row_that_there_is(
    two_sided: bool, density: float, shortest: int
) -> None:
    length = 10
    objective = SpanCorruptionObjective(noise_density=density, mean_span_tokens=1.5, min_document_tokens=shortest)
    layout = "encoder_decoder" if two_sided else "decoder"
    batch = BatchConfig(global_batch_size=1, micro_batch_size=1, sequence_length=length)
    worst = [0, 0]
    for lengths, cut in itertools.product(compositions(length), (False, True)):
        ids, ends = row_of(lengths, cut)
        tasks = span_tasks(ids, ends, length, t5_rule(density, 1.5, shortest), key=1)
        row = pair_row(tasks, START) if two_sided else prefix_row(tasks, bidirectional=True)
        worst = [max(a, b) for a, b in zip(worst, sizes(row), strict=True)]
    capacity = row_capacity(objective, batch, layout)
    if two_sided:
        assert (capacity.target, capacity.source) == (rounded(worst[0] + 1), rounded(worst[1] + 1))
    else:
        assert (capacity.target, capacity.source) == (rounded(worst[0]), None)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_row_of_any_objective_is_above_its_capacity(data: st.DataObject) -> None:
    length = data.draw(st.integers(4, 120))
    lengths: list[int] = []
    while sum(lengths) < length:
        lengths.append(data.draw(st.integers(1, length - sum(lengths))))
    cut, key = data.draw(st.booleans()), data.draw(st.integers(0, 2**63))
    ids, ends = row_of(lengths, cut, seed=key % 1000)
    shortest = data.draw(st.integers(2, max(2, min(20, length - 1))))
    density, mean = data.draw(st.floats(0.01, 0.99)), data.draw(st.floats(1, 70))
    batch = BatchConfig(global_batch_size=1, micro_batch_size=1, sequence_length=length)
    spans = SpanCorruptionObjective(noise_density=density, mean_span_tokens=mean, min_document_tokens=shortest)
    ul2 = UL2Objective(min_document_tokens=shortest)
    for objective, tasks in (
        (spans, span_tasks(ids, ends, length, t5_rule(density, mean, shortest), key)),
        (ul2, span_tasks(ids, ends, length, ul2_rule(ul2), key)),
        (PrefixLMObjective(), prefix_lm_tasks(ids, ends, length, key)),
    ):
        for layout, row in (
            ("encoder_decoder", pair_row(tasks, START)),
            ("decoder", prefix_row(tasks, bidirectional=True)),
        ):
            capacity = row_capacity(objective, batch, layout)
            shape = BatchShape(1, capacity.target, capacity.source, PAD, START)
            made = make_batch([row], shape, np.zeros(1400, dtype=np.int32), index=0, key=0)
            assert made.decoder_ids.numel() == capacity.target
            assert max((*row.lengths.tolist(), 0)) <= capacity.longest
            if capacity.source is not None:
                assert sizes(row)[0] < capacity.target
                assert sizes(row)[1] < capacity.source
                assert made.encoder_info is not None
                assert len(made.encoder_info.lengths) == len(made.decoder_info.lengths)
        used = [token for task in tasks for token in task.inputs.tolist() if token >= SENTINELS[0]]
        assert max(used, default=0) < SENTINELS[0] + max(1, most_sentinels(objective, length))
    fim = FillInTheMiddleObjective(rate=1.0, min_document_tokens=shortest)
    row = fill_in_the_middle_row(ids, ends, length, fim_rule(shortest=shortest), key)
    capacity = row_capacity(fim, batch, "decoder")
    assert row.decoder_ids.size <= capacity.target < length + 3 * (length // shortest) + 9
    assert max(row.lengths) <= capacity.longest


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    cut=st.booleans(),
    density=st.floats(0.01, 0.99),
    mean=st.floats(1, 20),
    shortest=st.integers(2, 12),
    key=st.integers(0, 2**63),
)
def test_each_document_comes_whole_from_its_own_sentinels_or_is_left_out_by_name(
    lengths: list[int], cut: bool, density: float, mean: float, shortest: int, key: int
) -> None:
    """`filled_in` refuses sentinels that do not begin anew; nothing of a neighbour may be in between."""
    ids, ends = row_of(lengths, cut)
    tasks = span_tasks(ids, ends, sum(lengths), t5_rule(density, mean, shortest), key)
    wanted, begin = [], 0
    for number, length in enumerate(lengths):
        body = length if cut and number == len(lengths) - 1 else length - 1
        if body >= shortest:
            wanted.append(ids[begin : begin + length].tolist())
        begin += length
    assert [filled_in(task)[0] for task in tasks] == wanted


@pytest.mark.parametrize("body", range(2, 60))
def test_counts_of_noise_leave_a_token_of_each_kind_for_every_span(body: int) -> None:
    for density, mean in itertools.product((0.01, 0.15, 0.5, 0.99), (1.0, 3.0, 64.0)):
        num_noise, num_spans = noise_counts(body, Noise(density, mean))
        assert 1 <= num_spans <= min(num_noise, body - num_noise)
        assert abs(num_noise - body * density) <= max(0.5, 1 - body * density, body * density - body + 1) + 1e-9
