"""The benchmarks measure what they say: fair turns, right ratios, a bare loop that learns, equal corpora."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import published
from benchmarks.__main__ import BENCHMARKS
from benchmarks.bare_loop import BareLoop, Shape
from benchmarks.corpus import make_corpus
from benchmarks.growth import exponent
from benchmarks.loader import LENGTH, ROWS, open_ours, through_memory_map, through_webdataset
from benchmarks.published import Row, table_rows, within
from benchmarks.result import Result, as_json, as_table, interleave, median_ratio

ROOT = Path(__file__).resolve().parents[2]
TINY = Shape(vocabulary_size=64, width=32, num_layers=2, num_heads=2, num_kv_heads=1, feed_forward_width=64)


def test_sides_are_measured_in_turn_and_in_alternating_order() -> None:
    calls: list[str] = []

    def side(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    values = interleave({"a": lambda: side("a"), "b": lambda: side("b")}, 3)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert values == {"a": [1.0, 4.0, 5.0], "b": [2.0, 3.0, 6.0]}


def test_the_ratio_is_that_of_neighbours_so_a_slow_minute_cancels() -> None:
    assert median_ratio([1.0, 10.0, 3.0], [2.0, 20.0, 6.0]) == 0.5


def test_json_has_the_keys_of_the_contract() -> None:
    result = Result("loss.time_vs_plain", 0.98, "ratio", "plain, s", 2.0, 7, "python -m benchmarks loss")
    (row,) = json.loads(as_json([result]))
    assert set(row) == {"metric", "value", "unit", "baseline", "baseline_value", "repetitions", "command"}
    assert "loss.time_vs_plain" in as_table([result])


def test_every_benchmark_named_is_a_module_that_measures() -> None:
    for name in BENCHMARKS:
        measure = importlib.import_module(f"benchmarks.{name}").measure  # fails where the product has moved on
        assert str(inspect.signature(measure)) == "(*, quick: 'bool', command: 'str') -> 'list[Result]'"


def test_an_unknown_benchmark_ends_with_2() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "stepp"], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert result.returncode == 2
    assert "loader" in result.stderr


def test_the_bare_loop_learns_a_batch_by_heart() -> None:
    loop = BareLoop(TINY, learning_rate=1e-2)
    ids = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(0))
    losses = [loop.step([(ids[:, :-1], ids[:, 1:])]) for _ in range(30)]
    assert losses[0] == pytest.approx(np.log(64), rel=0.05)
    assert losses[-1] < 0.5 * losses[0]


def test_accumulation_in_the_bare_loop_equals_one_large_batch() -> None:
    ids = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(0))
    whole, parts = BareLoop(TINY), BareLoop(TINY)
    whole.step([(ids[:, :-1], ids[:, 1:])])
    parts.step([(half[:, :-1], half[:, 1:]) for half in ids.split(2)])
    for left, right in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert (left - right).abs().mean() < 1e-4  # bf16 sums; a step is 1e-3


# webdataset leaves its tar open when a reader stops half way.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_all_readers_of_the_loader_benchmark_see_the_same_tokens(tmp_path: Path) -> None:
    """One pass over the corpus has the same counts of ids, whoever reads it."""
    corpus = make_corpus(tmp_path / "prose", "prose", 2**17)
    expected = np.bincount(corpus.ids, minlength=65536)
    flat = np.fromfile(corpus.flat, dtype="<u2")
    assert np.array_equal(flat, corpus.ids)
    with open_ours(corpus) as loader:
        state = loader.initial_state()
        seen = []
        for step in range(corpus.ids.size // (ROWS * LENGTH)):
            seen.append(loader.read(step, state).batches[0].decoder_ids.numpy())
            state = loader.next_state(state)
    assert np.array_equal(np.bincount(np.concatenate(seen), minlength=65536), expected)
    for read in (through_memory_map, through_webdataset):
        batches = read(corpus)
        assert next(batches).ids.shape == (ROWS * LENGTH,)
        batches.close()


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_an_exponent_of_growth_is_the_slope(power: float) -> None:
    sizes = [4.0, 16.0, 64.0, 256.0]
    assert exponent(sizes, [3e-6 * size**power for size in sizes]) == pytest.approx(power)


def test_texts_that_are_asked_are_not_trained_on_and_noise_does_not_count() -> None:
    from benchmarks.infilling import END, LETTERS, WIDER, held_out, make_texts, share_right

    trained = make_texts(150, seed=1)  # the seed of those that are asked: the first 150 are known
    asked = held_out(trained, 200)
    assert len(asked) == 200
    assert not set(asked) & set(trained)
    for text in asked:
        letters = text[slice(*LETTERS)]
        assert letters == 2 * letters[0]
        assert letters[0] in text[slice(*WIDER)]
        assert text[slice(*END)] == 3 * letters[0].upper()
        assert text[:4].isdigit()
    assert share_right(["9kk", "k", ""], ["1kk", "kk", "k"]) == 3 / 5


def test_rows_that_the_rates_were_fitted_to_do_not_count_as_met() -> None:
    def keys(rows: list[Row]) -> set[tuple[str, str, float]]:
        return {(row.accelerator, row.source, row.tokens_per_second_per_gpu) for row in rows}

    for accelerator in ("H100", "A100-80GB"):
        fitted, counted = table_rows(accelerator)[0::2], table_rows(accelerator)[1::2]
        assert keys(counted) <= keys(published.ROWS)
        assert not keys(fitted) & keys(published.ROWS)
    row = published.ROWS[0]
    assert within(replace(row, tokens_per_second_per_gpu=row.predicted() / 1.14), 0.15)
    assert not within(replace(row, tokens_per_second_per_gpu=row.predicted() / 1.16), 0.15)
