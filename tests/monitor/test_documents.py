"""What a step has read, as the dashboard tells and shows it, on real shards."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch import cli
from launch.monitor.server import DashboardServer
from pretrain.config import load_config
from pretrain.metrics.attention_plot import EntropyGrid, HeadPicture, draw_attention
from pretrain.rundir import RunDirectory
from tests.monitor.journals import Journal, step
from tests.monitor.runs import add_events
from tests.monitor.test_browser import Page, browser, page  # noqa: F401 - fixtures
from tests.monitor.test_server import get, serving
from tests.ranks_pool import RankPool
from tests.tiny import Tiny, build_tiny, steps_of


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("text"), documents=60).folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, texts: Path) -> Path:
    """`read`, a run of 8 steps of 8 rows over real shards."""
    home = tmp_path_factory.mktemp("home")
    path, *overrides = Tiny(texts).decoder("name=read")
    config = load_config(Path(path), overrides)
    run, _ = RunDirectory.claim(config, resume="never", home=str(home))
    records = [{**step(10.0 + n, n, 1.0), "loss": 5.0 - 0.1 * n} for n in range(1, 9)]
    run.store.put(run.metrics_key(1), b"".join(json.dumps(row).encode() + b"\n" for row in records))
    journal = Journal().at(0, "created").at(1, "attempt_started", attempt=1, ranks=1, host="here", why="first start")
    journal.at(200, "attempt_ended", attempt=1, outcome="completed").at(200, "completed", step=8)
    add_events(run, journal.events)
    return home


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[DashboardServer]:
    with serving(home) as server:
        yield server


def test_the_answer_is_that_of_data_explain_and_its_text_is_in_the_source(
    server: DashboardServer, home: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = get(server, "/api/documents?name=read&step=3").json()
    assert cli.main(["data", "explain", str(home / "read"), "--step", "2", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert answer["rows_in_step"] == len(explained) == 8
    lines = [json.loads(line)["text"] for line in (texts / "text.jsonl").read_text().splitlines()]
    for row, theirs in zip(answer["rows"], explained, strict=True):
        assert row["row"] == theirs["row"]
        assert row["step"] == 2
        for part, original in zip(row["documents"], theirs["documents"], strict=True):
            assert part["text"] == original["text"]
            assert part["text"] in lines[part["line"] - 1]


def test_rows_are_limited_and_steps_that_do_not_exist_are_refused(server: DashboardServer) -> None:
    assert len(get(server, "/api/documents?name=read&step=1&rows=3").json()["rows"]) == 3
    refused = get(server, "/api/documents?name=read&step=9")
    assert refused.status == 400
    assert refused.json()["error"] == "step=9 is not in this run. Its steps are 1 to 8. Choose one of these."
    assert get(server, "/api/documents?name=read&step=0").status == 400
    assert get(server, "/api/documents?name=read&step=1&rows=1000").status == 400


def test_a_click_on_a_curve_shows_the_documents_of_that_step(
    page: Page,  # noqa: F811
    server: DashboardServer,
) -> None:
    page.goto(f"{server.url}#/run/read")
    page.wait_for_selector("[data-field=loss] .u-over", timeout=30_000)
    box = page.locator("[data-field=loss] .u-over").bounding_box()
    with page.expect_response(re.compile(r"/api/documents\?.*step=5")) as answered:
        page.mouse.click(box["x"] + box["width"] * 4 / 7, box["y"] + 60)
    page.wait_for_selector(".documents details")
    shown = page.locator(".documents").inner_text()
    for row in answered.value.json()["rows"]:
        assert f"row {row['row']}, text, epoch {row['epoch']}" in shown
        assert row["documents"][0]["text"].strip() in shown
    page.keyboard.press("d")
    page.keyboard.press("Control+A")
    page.keyboard.type("3")
    with page.expect_response(re.compile(r"/api/documents\?.*step=3")):
        page.keyboard.press("Enter")
    page.get_by_text("step 3: 8 rows").wait_for()


def test_samples_and_attention_maps_of_a_run_are_on_its_page(server: DashboardServer, home: Path, page: Page) -> None:  # noqa: F811
    run = RunDirectory.locate(str(home / "read"))
    lines = [{"prompt": "the cat", "text": "sat on <b>the</b> mat"}, {"prompt": "a dog", "error": "not finite"}]
    run.store.put("samples/prompts-00000008.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    run.store.put("samples/step-00000004.jsonl", b'{"source": "der Hund"}\n')
    head = HeadPicture("decoder.0 head 0", np.eye(3), ["a", "b", "c"], ["a", "b", "c"])
    picture = draw_attention("read, step 8", EntropyGrid(["decoder.0"], [[0.5]]), [head])
    run.store.put("plots/attention-step-00000008.png", picture)
    page.goto(f"{server.url}#/run/read")
    page.wait_for_selector("section[aria-label=Samples] pre")
    assert page.get_by_label("Samples of a step").inner_text().split("\n") == [
        "step 8, prompts",
        "step 4, held-out pairs",
    ]
    shown = [text.inner_text() for text in page.locator("section[aria-label=Samples] pre").all()]
    assert shown == ["the cat", "sat on <b>the</b> mat", "a dog", "not finite"]
    page.locator("summary:has-text('Pictures')").click()
    image = page.locator("figure img")
    image.scroll_into_view_if_needed()
    page.wait_for_load_state("networkidle")
    assert image.evaluate("(image) => image.decode().then(() => image.naturalWidth)") > 100


def test_an_open_page_shows_that_its_real_run_was_killed(
    rank_pool: RankPool,
    texts: Path,
    browser: Any,  # noqa: F811
    tmp_path: Path,
) -> None:
    words = Tiny(texts).decoder("name=hurt", "schedule.total_steps=100000", "cluster.num_ranks=1")
    environment = {"PRETRAIN_HOME": str(tmp_path / "runs")}
    group = rank_pool.start(words, ranks=1, environment=environment, logs=[tmp_path / "hurt.log"])
    try:
        deadline = time.monotonic() + 60
        metrics = tmp_path / "runs" / "hurt" / "metrics" / "attempt-001.jsonl"
        while not (metrics.exists() and metrics.stat().st_size > 10_000) and time.monotonic() < deadline:
            time.sleep(0.1)
        with serving(tmp_path / "runs") as server:
            page = browser.new_page()
            page.goto(f"{server.url}#/run/hurt")
            page.wait_for_selector(".state.running", timeout=30_000)
            page.wait_for_selector("[data-field=loss] canvas", timeout=30_000)
            group.kill()
            assert group.codes == {0: -signal.SIGKILL}
            page.wait_for_selector(".state.lost", timeout=30_000)
            assert "go on with pretrain resume" in page.locator("main").inner_text()
            last = max(steps_of(tmp_path / "runs" / "hurt"))
            page.wait_for_selector(f"text=step {last:,} of 100,000", timeout=30_000)
            page.close()
    finally:
        group.kill()
