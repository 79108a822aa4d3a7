"""Random runs: any ranks, any reading ahead, killed anywhere, give the rows of one rank that reads step by step."""

from __future__ import annotations

import hashlib
import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pretrain.data.batch import sum_digests
from pretrain.data.loader import Loader, open_loader
from pretrain.data.order import RowOrder, SourceShape
from pretrain.data.stages import Plan, Stage, plan_run
from pretrain.data.state import DataState, Segment, SegmentSource
from pretrain.topology import World
from tests.data_read.corpus import (
    BYTE_LENGTHS,
    PAIR_CHANGES,
    random_documents,
    random_pairs,
    run_config,
    write_pairs,
    write_tokenizer_file,
    write_tokens,
)

STEPS = 5


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    tokenizer = write_tokenizer_file(root)
    for name, count, seed in (("a", 90, 1), ("b", 14, 2), ("c", 200, 3)):
        write_tokens(root / name, random_documents(count, 14, seed), tokenizer)
    write_pairs(root / "pairs", random_pairs(120, 8, 3), tokenizer)
    return root


def config_of(root: Path, drawn: dict[str, Any]) -> Any:
    changes: dict[str, Any] = {
        "seed": drawn["seed"], "batch__global_batch_size": drawn["batch"] * drawn["micro"],
        "batch__micro_batch_size": drawn["micro"], "data__prefetch_steps": drawn["prefetch"],
        "data__window_blocks": drawn["window"], "data__lanes": drawn["lanes"],
    }  # fmt: skip
    if drawn["kind"] == "seq2seq":
        return run_config(root / "tokenizer.json", {"p": root / "pairs"}, **PAIR_CHANGES, **changes)
    sources = {name: (root / name, weight) for name, weight in zip("abc", drawn["weights"], strict=True)}
    changes["data__stages"] = [
        {"from_step": 2, "weights": {"a": 1, "c": 2}},
        {"from_tokens": 3 * drawn["batch"] * drawn["micro"] * 16, "global_batch_size": 4 * drawn["micro"]},
    ]
    return run_config(root / "tokenizer.json", sources, objective__kind=drawn["kind"], **changes)


def digests(loader: Loader, state: DataState, first: int, count: int) -> tuple[list[int], DataState]:
    found = []
    for step in range(first, first + count):
        found.append(loader.read(step, state).digest)
        state = loader.next_state(state)
    return found, state


runs = st.builds(
    dict,
    kind=st.sampled_from(["causal_lm", "prefix_lm", "seq2seq"]),
    weights=st.tuples(*[st.integers(1, 9)] * 3),
    batch=st.integers(1, 6),
    micro=st.sampled_from([1, 2, 4]),
    lanes=st.sampled_from([1, 2, 4]),
    window=st.integers(1, 3),
    prefetch=st.integers(1, 4),
    seed=st.integers(0, 2**50),
    ranks=st.integers(1, 16),
    kills=st.lists(st.integers(1, STEPS - 1), max_size=1),
)


@settings(derandomize=True, deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=runs)
def test_any_ranks_threads_and_kills_give_the_same_digests(root: Path, drawn: dict[str, Any]) -> None:
    config = config_of(root, drawn)
    with open_loader(config, BYTE_LENGTHS, World()) as loader:
        assert isinstance(loader, Loader)
        states = [loader.initial_state()]
        for _ in range(STEPS):
            states.append(loader.next_state(states[-1]))
        # Random access, last step first: what is read ahead of it is dropped each time.
        alone = [loader.read(step, states[step]).digest for step in reversed(range(STEPS))][::-1]
    for killed in {0, *drawn["kills"]}:
        parts = []
        for rank in range(drawn["ranks"]):
            with open_loader(config, BYTE_LENGTHS, World(rank, drawn["ranks"], rank, drawn["ranks"])) as loader:
                assert isinstance(loader, Loader)
                state = loader.resume(DataState.from_json(json.loads(json.dumps(states[killed].to_json()))))
                parts.append(digests(loader, state, killed, STEPS - killed)[0])
        assert [sum_digests(step) for step in zip(*parts, strict=True)] == alone[killed:]


GOLDEN = {
    "causal_lm": "2c2c6d3d6e1850b7",
    "prefix_lm": "830d2869ee34083f",
    "masked_lm": "5962cdf987410b6e",
    "seq2seq": "0197f4351b7bc243",
}
ENCODER = {
    "family": "encoder", "vocabulary_size": 301, "width": 8, "num_heads": 2, "feed_forward_width": 8, "num_layers": 1,
    "max_length": 16,
}  # fmt: skip


@pytest.mark.parametrize("kind", GOLDEN)
def test_what_a_run_reads_never_changes(root: Path, kind: str) -> None:
    drawn = {
        "kind": "causal_lm" if kind == "masked_lm" else kind, "weights": (7, 2, 1), "batch": 4, "micro": 2, "lanes": 2,
        "window": 2, "prefetch": 2, "seed": 42,
    }  # fmt: skip
    config = config_of(root, drawn)
    if kind == "masked_lm":
        body = config.model_dump(mode="json") | {"model": ENCODER, "objective": {"kind": "masked_lm"}}
        config = type(config).model_validate(body)
    with open_loader(config, BYTE_LENGTHS, World()) as loader:
        assert isinstance(loader, Loader)
        found, _ = digests(loader, loader.initial_state(), 0, 10)
    assert hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16] == GOLDEN[kind]


def test_a_million_blocks_are_planned_in_the_memory_of_a_thousand() -> None:
    """Nothing is held per block: the peak of planning a run with a cap and three mixtures does not grow with them."""

    def peak(blocks: int) -> int:
        sources = tuple(SegmentSource(name, name, 1.0, blocks, 1024) for name in ("a", "b"))
        base = Segment(0, 512, 8, 64, 2, 64, 64, None, sources)
        stages = (Stage((("a", 3.0), ("b", 1.0)), step=100), Stage(tokens=2**40, global_batch_size=1024))
        steps = 3 * blocks * 1024 // 512
        plan, began = Plan(base, stages, (("a", 1.5),), total_steps=steps), time.thread_time()
        plan_run(plan, DataState(0, 1, ()))
        assert time.thread_time() - began < 1
        tracemalloc.start()
        state = plan_run(plan, DataState(0, 1, ()))
        assert blocks < 1000 or len(state.segments) >= 3
        order = RowOrder([SourceShape("x", blocks, 1024, 0.7), SourceShape("y", blocks, 1024, 0.3)], 1, 64, 2)
        order.locate_range(blocks * 700, 512)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    peak(10)  # what is made once
    assert peak(10**6) < 1.2 * peak(10**3) + 10_000
