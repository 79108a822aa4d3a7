"""Named points: the list is the source's, nothing happens unasked, an order fires once and leaves its mark."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretrain import faults
from tests.chaos.cluster import cluster_trials
from tests.chaos.plan import direct_trials

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "orders.json"
    monkeypatch.setenv(faults.VARIABLE, str(path))
    yield path
    monkeypatch.delenv(faults.VARIABLE)
    faults.arm("rank")


def _points_in_source() -> list[str]:
    found = []
    for path in [*(ROOT / "pretrain").rglob("*.py"), *(ROOT / "launch").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "passing":
                first = node.args[0]
                assert isinstance(first, ast.Constant), f"{path}: a point is a literal"
                found.append(str(first.value))
    return found


def test_every_point_of_the_list_is_in_the_source_and_none_besides() -> None:
    assert set(_points_in_source()) == faults.POINTS


def test_the_whole_campaign_reaches_every_point_five_times_and_40_of_its_trials_go_through_ray() -> None:
    direct, through_ray = direct_trials(160, seed=0), cluster_trials(40, seed=0)
    points = [point for trial in (*direct, *through_ray) for point in trial.counted]
    assert {point: points.count(point) for point in faults.POINTS if points.count(point) < 5} == {}
    assert len({trial.number for trial in (*direct, *through_ray)}) == 200


def test_a_mixture_of_experts_is_hurt_at_every_point_that_a_decoder_is_hurt_at_before_it_goes_back() -> None:
    hurt = [trial for trial in direct_trials(160, seed=0) if not trial.guilty]
    points = [{order["point"] for trial in hurt if trial.experts is experts for order in trial.orders} for experts in
              (True, False)]  # fmt: skip
    assert points[0] == points[1]
    assert {trial.ranks for trial in hurt if trial.experts} == {1, 2}


def test_without_orders_a_point_does_nothing(orders: Path) -> None:
    faults.arm("rank", rank=0)
    faults.passing("step.begins")
    orders.write_text(json.dumps([{"point": "step.begins", "do": "exit:9", "rank": 1}]))
    faults.arm("rank", rank=0)
    faults.passing("step.begins")
    faults.arm("agent", rank=1)
    faults.passing("step.begins")
    assert list(orders.parent.iterdir()) == [orders]


def test_an_error_is_raised_from_the_nth_passage_of_its_detail_on_as_often_as_ordered(orders: Path) -> None:
    orders.write_text(
        json.dumps([{"point": "store.open", "do": "error:ENOSPC", "nth": 2, "times": 2, "detail": "MANIFEST"}])
    )
    faults.arm("rank", rank=0)
    seen = []
    for detail in ("MANIFEST", "other", "MANIFEST", "MANIFEST", "MANIFEST"):
        try:
            faults.passing("store.open", f"a/{detail}.json")
            seen.append("")
        except OSError as error:
            seen.append(f"{error.errno} {error.strerror}")
    assert seen == ["", "", *["28 No space left on device (ordered at store.open a/MANIFEST.json)"] * 2, ""]
    assert json.loads(Path(f"{orders}.fired-0").read_text())["pid"] == os.getpid()


def test_an_order_fires_in_one_process_only(orders: Path) -> None:
    orders.write_text(json.dumps([{"point": "step.begins", "do": "exit:9"}]))
    program = "from pretrain import faults\nfaults.arm('rank')\nfaults.passing('step.begins')\n"
    codes = [subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode for _ in range(3)]
    assert codes == [9, 0, 0]


@pytest.mark.parametrize(
    "order", [{"point": "step.nowhere", "do": "kill"}, {"point": "step.begins", "do": "kill", "x": 1}]
)
def test_a_wrong_order_is_an_error_of_the_test(orders: Path, order: dict[str, object]) -> None:
    orders.write_text(json.dumps([order]))
    with pytest.raises(ValueError, match="order 0 is wrong"):
        faults.arm("rank")
