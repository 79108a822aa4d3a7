"""A real run with planted faults (spike, kill, slow rank, data stall): each is seen everywhere that people look.

One run serves all: while it goes on after its faults, its records, Prometheus (each query of the Grafana
dashboard too) and the page are asked; when it has stopped, its ledger and its report.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from launch import cli
from launch.monitor.reader import RunReader
from launch.monitor.server import DashboardServer
from launch.monitor.watch_app import WatchApp
from launch.session import RANK_COMMAND_VARIABLE, controlled, hold_run
from pretrain.config import load_config
from pretrain.log import Log
from pretrain.metrics.definitions import RANK_FIELDS, STEP_FIELDS, TABLES, unknown_fields
from pretrain.rundir import RunDirectory
from tests.launch.nodes import ProcessNodes
from tests.monitor.prometheus_server import FILES, QUERIES, ask, prometheus
from tests.monitor.test_browser import browser  # noqa: F401 (a fixture)
from tests.monitor.test_prometheus import samples
from tests.monitor.test_server import get, serving
from tests.tiny import build_tiny
from tests.train.guilty import digests_of_steps

pytestmark = pytest.mark.timeout(400)
STALL, SPIKE, KILL, SAVE_EVERY = 14, 28, 44, 5
PLAN = {"stall": [STALL, 1.2], "slow_s": 0.02, "kill": KILL, "pace_s": 0.05}
OVERRIDES = (
    "schedule.total_steps=100000", f"checkpoint.every_steps={SAVE_EVERY}", "cluster.standbys=off",
    "health.spike_z_score=12", "health.spike_window_steps=8", "metrics.layers_every_steps=10", "eval.every_steps=20",
)  # fmt: skip


class Planted:
    """The run, under the real controller with an agent, without Ray: alive until `stop`."""

    def __init__(self, home: Path, arguments: list[str]) -> None:
        self.home = home
        self.config = load_config(arguments[0], arguments[1:])
        self.run, _ = RunDirectory.claim(self.config, resume="never", home=str(home))
        self.log = io.StringIO()
        self.thread = threading.Thread(target=self._control)
        self.thread.start()

    def _control(self) -> None:
        log = Log(stream=self.log)
        nodes = ProcessNodes({"here": 2})
        with (
            hold_run(self.run, [], purpose="test", takeover=False, log=log) as lease,
            controlled(self.run, self.config, lease, nodes, address="127.0.0.1", one_host=True, log=log) as controller,
        ):
            controller.run()

    def records(self, attempt: int) -> list[dict[str, Any]]:
        path = self.home / "planted" / "metrics" / f"attempt-{attempt:03d}.jsonl"
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return [record for record in map(json.loads, lines) if "loss" in record]

    def wait_for_step(self, attempt: int, step: int, timeout_s: float = 240.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not (found := self.records(attempt)) or found[-1]["step"] < step:
            assert self.thread.is_alive(), self.log.getvalue()[-4000:]
            assert time.monotonic() < deadline, self.log.getvalue()[-4000:]
            time.sleep(0.1)

    def stop(self) -> None:
        if self.thread.is_alive():
            assert cli.main(["stop", str(self.home / "planted")]) == 0
            self.thread.join(60)
        assert not self.thread.is_alive(), self.log.getvalue()[-4000:]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    folder = tmp_path_factory.mktemp("planted")
    tiny = build_tiny(folder)
    arguments = tiny.decoder("name=planted", *OVERRIDES)
    guilty = digests_of_steps(arguments, range(SPIKE - 1, SPIKE))[SPIKE - 1]
    variables = {
        "PLANTED": json.dumps(PLAN),
        "GUILTY": json.dumps(dict.fromkeys(guilty, 30.0)),
        RANK_COMMAND_VARIABLE: json.dumps([sys.executable, "-m", "tests.monitor.planted"]),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        run = Planted(folder / "runs", arguments)
        try:
            run.wait_for_step(2, KILL + 8)
            yield run
        finally:
            run.stop()


@pytest.fixture(scope="module")
def server(planted: Planted) -> Iterator[DashboardServer]:
    with serving(planted.home) as server:
        yield server


def test_the_records_show_stall_slow_rank_spike_and_kill(planted: Planted) -> None:
    first, second = planted.records(1), planted.records(2)
    assert [unknown_fields(record) for record in first + second if unknown_fields(record)] == []
    stalled = [record for record in first if record["data_wait_s"] > 1.0]
    assert [record["step"] for record in stalled] == [STALL]
    assert stalled[0]["ranks"]["data_wait_s"][0] > 1.0 > stalled[0]["ranks"]["data_wait_s"][1]
    slow = [record["ranks"]["forward_s"][1] - record["ranks"]["forward_s"][0] for record in first]
    assert statistics.median(slow) > 0.5 * 2 * PLAN["slow_s"]  # two micro-batches of a step
    spikes = [record for record in first if record["loss"] > 10 * first[1]["loss"]]
    assert [record["step"] for record in spikes] == [SPIKE, SPIKE]  # computed again: the data's fault
    assert first[-1]["rollbacks"] == 1
    assert first[-1]["step"] == KILL - 1
    assert second[0]["step"] == SAVE_EVERY * ((KILL - 1) // SAVE_EVERY) + 1
    tenth = next(record for record in first if record["step"] == 10)
    assert {"layers.0", "layers.1", "embedding"} <= tenth["layers"].keys()
    assert tenth["attention"].keys() == {"decoder.0", "decoder.1"}


def test_a_real_run_writes_every_field_of_the_registry_that_this_machine_has(planted: Planted) -> None:
    known = set(STEP_FIELDS) | {f"{table}.{name}" for table, fields in TABLES.items() for name in fields}
    known |= {f"ranks.{name}" for name in RANK_FIELDS}
    seen: set[str] = set()
    for path in sorted((planted.home / "planted" / "metrics").glob("*.jsonl")):
        for record in map(json.loads, path.read_text().rpartition("\n")[0].splitlines()):
            seen |= {name for name, value in record.items() if value is not None} - TABLES.keys() - {"ranks"}
            seen |= {f"ranks.{name}" for name in record.get("ranks", {})}
            for table in TABLES:
                for row in record.get(table, {}).values():
                    seen |= {f"{table}.{name}" for name, value in row.items() if value is not None}
    elsewhere = {"memory_copy_step"}  # with copies in memory: tests/train/test_runs
    elsewhere |= {"objectives.loss", "objectives.target_tokens"}  # with ul2: tests/train/test_step_watch
    # Of a mixture of experts: tests/train/test_experts_runs.
    elsewhere |= {"balance_loss", "router_z_loss", "largest_expert_share", "idle_experts"}
    elsewhere |= {"validation.bleu", "validation.chrf", "validation.sentences"}  # of pairs: tests/train/test_pairs
    cuda = {"allocated_bytes", "reserved_bytes", "ranks.allocated_bytes", "ranks.reserved_bytes"}
    assert known - seen - {"warnings"} == elsewhere | (set() if torch.cuda.is_available() else cuda)
    assert seen <= known


def test_the_terminal_shows_what_the_page_shows(planted: Planted) -> None:
    async def look() -> tuple[str, list[str]]:
        app = WatchApp(RunReader(planted.run), 0.5)
        async with app.run_test(size=(110, 60)) as pilot:
            deadline = time.monotonic() + 60
            while not app.shown and time.monotonic() < deadline:
                await pilot.pause(0.05)
            await pilot.pause()
            text = "\n".join(" ".join(panel.lines) for page in app.shown.values() for panel in page)
            marks = app.shown["history"][0].lines[0]
            assert marks.index("1") < marks.index("↶") < marks.index("✗") < marks.index("2"), marks
            pictures = [app.export_screenshot()]
            await pilot.press("2")
            await pilot.pause(0.5)
            return " ".join(text.split()), [*pictures, app.export_screenshot()]

    text, pictures = asyncio.run(look())
    for fact in (f"rolled back at step {SPIKE}", "application fault in attempt 1", "the fault is of the data",
                 "data wait", "rework", "decoder.1", "layers.0", "rank 1 (x ", "durable", "sizes match",
                 "rollbacks 1", "running"):  # fmt: skip
        assert fact in text, (fact, text)
    if os.environ.get("SCREENSHOTS"):
        for name, picture in zip(("watch", "watch-history"), pictures, strict=True):
            Path(os.environ["SCREENSHOTS"], f"{name}.svg").write_text(picture)


def test_speed_and_tokens_go_on_after_the_restart(planted: Planted) -> None:
    first, second = planted.records(1), planted.records(2)
    counted = {record["step"]: record["tokens"] for record in first}  # of a step done twice the later record
    assert second[0]["tokens"] == counted[second[0]["step"] - 1] + second[0]["target_tokens"]
    for record in second[1:]:
        assert record["tokens_per_second"] == pytest.approx(record["target_tokens"] / record["step_s"], rel=1e-6)


def test_prometheus_has_them_and_answers_every_query_of_the_grafana_dashboard(
    planted: Planted, server: DashboardServer, tmp_path: Path
) -> None:
    found = samples(get(server, "/metrics").body.decode())
    assert found["pretrain_faults_total", 'run="planted",cause="application"'] == 1
    assert found["pretrain_restarts_total", 'run="planted",cause="application"'] == 1
    assert found["pretrain_rollbacks", 'run="planted"'] == 1
    assert found["pretrain_spent_seconds", 'run="planted",kind="data wait"'] > 1.0
    assert found["pretrain_spent_seconds", 'run="planted",kind="rework"'] > 0
    own = [found["pretrain_rank_own_seconds", f'run="planted",rank="{rank}"'] for rank in (0, 1)]
    assert own[1] > own[0] + PLAN["slow_s"]
    with prometheus(urlsplit(server.url).netloc, tmp_path) as address:
        empty = {title for title, query in QUERIES if not ask(address, query.replace("$run", ".*"))}
        # This run has neither: tests/monitor/test_prometheus has their series.
        assert empty == {"Held-out translations", "Experts: share of the fullest, number without a token"}
        rules = json.loads(ask(address, "", path="rules"))["data"]["groups"][0]["rules"]
        assert {rule["health"] for rule in rules} == {"ok"}
    assert len(rules) == len(re.findall("- alert:", (FILES / "alerts.yaml").read_text()))


def test_the_page_shows_them(planted: Planted, server: DashboardServer, browser: Any) -> None:  # noqa: F811
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(f"{server.url}#/run/planted")
    page.wait_for_selector("[data-field=loss] canvas", timeout=30_000)
    page.wait_for_selector("canvas.heat", timeout=30_000)
    text = page.locator("main").inner_text()
    for fact in ("application fault in attempt 1", f"rolled back at step {SPIKE}", "data wait", "rework",
                 "rank 1 (×", "discarded steps", "the fault is of the data"):  # fmt: skip
        assert fact in text, fact
    marked = page.locator("svg.time title").all_text_contents()
    for words in (f"rolled back at step {SPIKE}", "application: rank 1", "attempt 2 starts", "step-00000005-a001"):
        assert any(words in title for title in marked), words
    for field in ("data_wait_s,forward_s,backward_s,optimizer_s", "sources.loss", "layers.update_norm"):
        assert page.locator(f'[data-field="{field}"] canvas').count() == 1, field
    # The spike is drawn, though it was discarded; the frame is that of the line that counts.
    spike = max(record["loss"] for record in planted.records(1))
    drawn = page.request.get(f"{server.url}api/curves?runs=planted&fields=loss").json()["curves"]["planted"]["loss"]
    assert max(value for value in drawn["lost"][1] if value is not None) == pytest.approx(spike)
    assert len(set(drawn["lost"][0])) > 3
    assert "discarded" in page.locator("[data-field=loss] .u-legend").inner_text()
    folder = os.environ.get("SCREENSHOTS")
    if folder:
        page.screenshot(path=f"{folder}/run.png", full_page=True)
    page.set_viewport_size({"width": 360, "height": 740})
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.close()
    assert problems == []


def test_the_ledger_adds_up_to_the_wall_time_and_every_second_has_a_cause(
    planted: Planted,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    browser: Any,  # noqa: F811
) -> None:
    """Last: it stops the run."""
    planted.stop()
    capsys.readouterr()
    assert cli.main(["report", str(planted.home / "planted"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    seconds, events = report["ledger"]["seconds"], planted.run.events()
    wall_s = events[-1].t - events[0].t
    assert sum(seconds.values()) == pytest.approx(wall_s, rel=0.01)
    assert seconds["unexplained"] < 0.005 * wall_s
    waits = sum(record["data_wait_s"] for attempt in (1, 2) for record in planted.records(attempt))
    assert seconds["data wait"] == pytest.approx(waits, abs=2.0)
    first, second = planted.records(1), planted.records(2)
    # Steps after the checkpoint that the second attempt began with, and those that the spike cost.
    lost = sum(record["step_s"] for record in first if record["step"] >= second[0]["step"])
    back = [record for at, record in enumerate(first) if any(r["step"] <= record["step"] for r in first[at + 1 :])]
    lost += sum(record["step_s"] for record in back) + sum(record["rollback_s"] for record in first)
    assert seconds["rework"] == pytest.approx(lost, abs=4.0)
    (restart,) = report["ledger"]["restarts"]
    assert restart["cause"] == "application"
    assert seconds["restart"] == pytest.approx(sum(restart["phases"].values()), abs=0.01)
    assert all(row["verified"] != "" and row["bytes"] > 0 for row in report["checkpoints"])
    assert any(row["verified"].startswith("read by attempt 2") for row in report["checkpoints"])
    page = tmp_path / "report.html"
    assert cli.main(["report", str(planted.home / "planted"), "--html", str(page)]) == 0
    _check_html(page, browser)


def _check_html(path: Path, browser: Any) -> None:  # noqa: F811
    """The report opens from a file, without a server or a network, and shows the same."""
    assert path.stat().st_size < 4e6
    page = browser.new_page()
    asked: list[str] = []
    problems: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.context.set_offline(True)
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready=yes]", timeout=30_000)
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    text = page.locator("main").inner_text()
    for fact in ("application fault in attempt 1", f"rolled back at step {SPIKE}", "data wait", "stopped"):
        assert fact in text, fact
    assert page.locator("[data-field=loss] canvas").count() == 1
    page.keyboard.press("s")
    page.keyboard.press("x")
    page.wait_for_selector("text=tokens")
    if os.environ.get("SCREENSHOTS"):
        page.screenshot(path=f"{os.environ['SCREENSHOTS']}/report.png")
    page.context.set_offline(False)
    page.close()
    assert problems == []
