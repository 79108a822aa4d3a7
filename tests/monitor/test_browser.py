"""The dashboard in a real Chromium: what people see, press and drag.

Needs the Debian package `chromium` (tests/system_packages brings it) and playwright. Without a browser
these tests are skipped by name, except in continuous integration, where that is a failure.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.monitor.server import DashboardServer
from pretrain.rundir import Event, RunDirectory, this_process
from tests.missing import did_not_run
from tests.monitor.journals import Journal, step, validation
from tests.monitor.runs import add_events, write_run
from tests.monitor.test_server import serving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
Page = Any


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        did_not_run("no chromium on PATH for the dashboard in a browser. Run tests/system_packages")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`torn`, killed at 150 and gone on from 100, still running; `calm`, which has ended."""
    home = tmp_path_factory.mktemp("home")
    now = time.time() - 1000.0  # journals count from 1000
    journal = Journal().at(now - 400, "created")
    journal.at(now - 390, "attempt_started", attempt=1, ranks=2, host="here", why="first start")
    journal.at(now - 280, "committed", attempt=1, step=100, checkpoint="step-00000100-a001")
    journal.at(now - 220, "fault", attempt=1, cause="application", rank=1, message="rank 1 <b>was</b> killed")
    journal.at(now - 220, "attempt_ended", attempt=1, outcome="failed")
    journal.at(now - 219, "attempt_started", attempt=2, ranks=2, host="here", why="rank 1 was killed")
    journal.at(now - 210, "restored", attempt=2, step=100, checkpoint="step-00000100-a001")
    first = [_step(now - 380 + number, number) for number in range(1, 151)]
    second = [_step(now - 310 + number, number) for number in range(101, 301)]
    run = write_run(home, "torn", journal.events, {1: first, 2: second}, holder=this_process())
    run.store.put("logs/attempt-002/rank-00000.log", b"12:00:00 r0 restored <script>alert(1)</script>\n")
    ended = Journal().at(0, "created").at(1, "attempt_started", attempt=1, ranks=1, host="here", why="first start")
    ended.at(200, "attempt_ended", attempt=1, outcome="completed").at(200, "completed", step=150)
    rows = [_step(5.0 + number, number) for number in range(1, 151)]
    rows.append(validation(160, 150, 2.0))
    write_run(home, "calm", ended.events, {1: rows})
    return home


def _step(t: float, number: int) -> dict[str, Any]:
    spike = 40.0 if number == 77 else 0.0
    return {
        **step(t, number, 1.0),
        "loss": 2.0 + 6.0 / number,
        "gradient_norm": 1.0 + spike,
        "learning_rate": 1e-3,
        "tokens": 100 * number,
    }


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[DashboardServer]:
    with serving(home) as server:
        yield server


@pytest.fixture
def page(browser: Any, server: DashboardServer) -> Iterator[Page]:
    """A page on which any error of a script and any request to elsewhere fails the test."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda line: problems.append(line.text) if line.type in ("error", "warning") else None)
    page.on("request", lambda request: problems.append(request.url) if server.url not in request.url else None)
    yield page
    page.close()
    assert problems == []


def _open(page: Page, server: DashboardServer, where: str = "/") -> None:
    page.goto(f"{server.url}#{where}")
    page.wait_for_selector("html[data-ready=yes]", timeout=30_000)


def test_the_list_of_runs_can_be_filtered_walked_and_opened_by_keys(page: Page, server: DashboardServer) -> None:
    _open(page, server)
    page.wait_for_selector("a[data-run=calm]")
    page.wait_for_selector("a[data-run=torn]")
    assert page.locator("tbody tr").count() == 2
    assert "running" in page.locator("tbody tr").first.inner_text()
    page.keyboard.press("/")
    page.keyboard.type("cal")
    page.wait_for_function("document.querySelectorAll('tbody tr').length === 1")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1")
    assert page.locator("h1").inner_text() == "calm"
    page.keyboard.press("g")
    page.wait_for_selector("a[data-run=torn]")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("h1")
    assert page.locator("h1").inner_text() == "calm"


def test_a_runs_page_shows_state_ledger_curves_faults_and_logs(page: Page, server: DashboardServer) -> None:
    _open(page, server, "/run/torn")
    page.wait_for_selector("[data-field=loss] canvas")
    text = page.locator("main").inner_text()
    for fact in (
        "running",
        "step 300",
        "goodput",
        "rework",
        "restart",
        "failed: application",
        "saved step-00000100-a001",
    ):
        assert fact in text, fact
    # What a run says is text, never markup.
    assert "rank 1 <b>was</b> killed" in text
    assert "<script>alert(1)</script>" in page.locator(".log").inner_text()
    assert page.locator(".stack > i").count() >= 4
    assert page.locator("svg.time rect").count() >= 6
    assert _drawn(page, "loss") > 500


def test_dragging_zooms_every_curve_and_a_key_shows_the_whole_again(page: Page, server: DashboardServer) -> None:
    _open(page, server, "/run/torn")
    page.wait_for_selector("[data-field=gradient_norm] .u-over")
    page.locator("[data-field=gradient_norm]").scroll_into_view_if_needed()
    box = page.locator("[data-field=gradient_norm] .u-over").bounding_box()
    with page.expect_response(re.compile(r"/api/curves\?.*low=\d")) as zoomed:
        page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 60)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 70, steps=4)
        page.mouse.up()
    steps = zoomed.value.json()["curves"]["torn"]["loss"]["kept"][0]
    assert 55 <= steps[0] <= 65
    assert 118 <= steps[-1] <= 125
    with page.expect_response(re.compile(r"/api/curves\?.*low=&")) as whole:
        page.keyboard.press("0")
    assert whole.value.json()["curves"]["torn"]["loss"]["kept"][0][-1] >= 300


def test_keys_turn_to_logarithmic_smoother_other_axes_and_dark(page: Page, server: DashboardServer) -> None:
    _open(page, server, "/run/torn")
    page.wait_for_selector("[data-field=loss] canvas")
    linear = _picture(page, "loss")
    page.keyboard.press("l")
    page.wait_for_selector("button[aria-pressed=true]:has-text('log y')")
    _wait_until_drawn_anew(page, "loss", linear)
    logarithmic = _picture(page, "loss")
    page.get_by_text("discarded steps").click()
    _wait_until_drawn_anew(page, "loss", logarithmic)
    with page.expect_response(re.compile("smooth=10")):
        page.keyboard.press("s")
    with page.expect_response(re.compile("x=tokens")) as by_tokens:
        page.keyboard.press("x")
    assert by_tokens.value.json()["curves"]["torn"]["loss"]["kept"][0][0] == 100
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("t")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(map(int, re.findall(r"\d+", light))) > 600 > 150 > sum(map(int, re.findall(r"\d+", dark)))
    page.keyboard.press("?")
    assert page.locator("dialog[open]").count() == 1


def test_runs_overlaid_show_both_lines_and_what_their_configs_differ_in(page: Page, server: DashboardServer) -> None:
    _open(page, server, "/run/torn?with=calm")
    page.wait_for_selector("[data-field=loss] .u-legend")
    legend = page.locator("[data-field=loss] .u-legend").inner_text()
    assert "torn" in legend
    assert "calm" in legend
    page.wait_for_selector("details summary")
    assert page.locator("details summary").inner_text() == "Config: 1 fields differ"
    page.get_by_label("Remove calm").click()
    page.wait_for_function("!location.hash.includes('calm')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_needs_no_sideways_scrolling(browser: Any, server: DashboardServer, scheme: str) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme=scheme)
    try:
        for where in ("/", "/run/torn?with=calm"):
            _open(page, server, where)
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
    finally:
        page.close()


def test_an_open_page_follows_a_run_to_its_end(page: Page, server: DashboardServer, home: Path) -> None:
    """Last: it ends the run."""
    _open(page, server, "/run/torn")
    page.wait_for_selector("text=step 300")
    run = RunDirectory.locate(str(home / "torn"))
    line = json.dumps(_step(time.time() - 1000.0, 310)).encode() + b"\n"
    run.store.append(run.metrics_key(2), line[:30])
    run.store.append(run.metrics_key(2), line[30:])
    page.wait_for_selector("text=step 310", timeout=20_000)
    add_events(run, [Event("failed", time.time(), 1, 99, {"reason": "crash loop: three attempts", "exit_code": 3})])
    page.wait_for_selector(".state.failed", timeout=20_000)
    assert "crash loop: three attempts" in page.locator("main").inner_text()


def test_a_dashboard_that_is_gone_is_said(browser: Any, server: DashboardServer) -> None:
    page = browser.new_page()
    try:
        _open(page, server, "/")
        page.context.set_offline(True)
        page.wait_for_selector(".pulse.bad", timeout=20_000)
        assert "does not answer" in page.locator(".pulse").inner_text()
    finally:
        page.close()


_CANVAS = "(field) => document.querySelector(`[data-field='${field}'] canvas`)?.toDataURL()"


def _picture(page: Page, field: str) -> str:
    return str(page.evaluate(_CANVAS, field))


def _wait_until_drawn_anew(page: Page, field: str, before: str) -> None:
    page.wait_for_function(f"([field, before]) => ({_CANVAS})(field) !== before", arg=[field, before], timeout=20_000)


def _drawn(page: Page, field: str) -> int:
    """Pixels of a chart that are neither empty nor grid: the curve is really there."""
    count: int = page.evaluate(
        """(field) => {
          const canvas = document.querySelector(`[data-field="${field}"] canvas`);
          const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          let found = 0;
          for (let at = 0; at < data.length; at += 4) if (data[at + 3] > 100 && data[at + 2] - data[at] > 60) found++;
          return found;
        }""",
        field,
    )
    return count
