"""A controller of 512 nodes with 8 ranks each keeps up with all of them."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tests.launch.large import looks


@pytest.mark.slow  # CPU time of a thread, which other work on the same cores stretches several times
def test_a_look_at_512_nodes_of_8_ranks_takes_under_50_ms(tmp_path: Path) -> None:
    times = looks(tmp_path, agents=512, ranks=8, beat_s=2.0, seconds=6.0)
    median, worst = statistics.median(times), max(times)
    high = statistics.quantiles(times, n=100)[98]
    told = f"median {1000 * median:.1f} ms, 99th percentile {1000 * high:.1f} ms, worst {1000 * worst:.1f} ms"
    print(f"{len(times)} looks, {told}")
    assert high < 0.05, told
