"""The dashboard over many long runs: how long pages take to open, and what memory the server needs.

1,000 run directories of 100,000 records each (their files are links to one run's, written by the sink of rank 0), read
by the server of `pretrain dashboard` in a process of its own. `first_s` is until the list first shows runs, `list_s`
until it is complete, `run_s` a run's page with all of its requests, `overlay_s` one with eight runs, both read for the
first time. `…_cpu_s` is what the server computes for it: the wall time of a machine with nothing else to do.
`browser_…_s` is what people wait for: in a real Chromium, from the request for a page until its rows or its curves are
on the screen, without a cache, read by the server for the first time.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from benchmarks.result import Result, median
from pretrain.config import load_config
from pretrain.metrics import JsonlSink
from pretrain.rundir import EventKind, Lease, RunDirectory

ROOT = Path(__file__).resolve().parents[1]
FIELDS = (
    "loss,validation.loss,validation.bits_per_byte,tokens_per_second,gradient_norm,learning_rate,mfu,step_s,"
    "data_wait_s,forward_s,backward_s,optimizer_s,host_bytes,straggling,sources.text.loss,sources.text.share"
)


def _record(step: int, t: float) -> dict[str, Any]:
    ranks = {"own_s": [0.5, 0.51], "data_wait_s": [0.01, 0.01], "forward_s": [0.4, 0.4], "host_bytes": [4e8, 4e8]}
    return {
        "t": t, "step": step, "loss": 2 + 8 / (1 + step / 100) + 0.1 * (step * 7919 % 97) / 97, "objective": 2.1,
        "z_loss": 30.0, "learning_rate": 3e-4, "gradient_norm": 1 + (step * 31 % 13) / 13, "applied": True,
        "skipped_steps": 0, "rollbacks": 0, "target_tokens": 4096, "tokens": 4096 * step, "masked_rows": 0,
        "data_digest": f"{step:012x}", "steps": 1, "step_s": 1.0, "tokens_per_second": 4096.0, "mfu": 0.4, "hfu": 0.4,
        "eta_s": 1000.0, "peak_flops": 1e12, "data_wait_s": 0.01, "forward_s": 0.4, "backward_s": 0.5,
        "optimizer_s": 0.05, "straggling": 1.01, "host_bytes": 4e8, "save_stall_s": 0.0, "rollback_s": 0.0,
        "sources": {"text": {"loss": 2.5, "target_tokens": 4096, "share": 1.0, "planned_share": 1.0, "epochs": 0.1}},
        "ranks": ranks,
    }  # fmt: skip


def make_home(home: Path, runs: int, records: int) -> None:
    """Run directories that have ended; all but the first are links."""
    config = load_config(str(ROOT / "configs/tests/tiny-decoder.yaml"), ["name=run-0000"], check_files=False)
    run, _ = RunDirectory.claim(config, resume="never", home=str(home))
    lease = Lease.acquire(run.store, purpose="benchmark")
    journal = run.journal(lease)
    journal.append(EventKind.CREATED)
    journal.append(EventKind.ATTEMPT_STARTED, attempt=1, ranks=2, host="here", why="first start")
    sink = JsonlSink(run.store, run.metrics_key(1))
    began = time.time()
    for step in range(1, records + 1):
        sink.write(_record(step, began + step))
    sink.close()
    journal.append(EventKind.COMPLETED, step=records)
    lease.release()
    for number in range(1, runs):
        shutil.copytree(home / "run-0000", home / f"run-{number:04d}", copy_function=os.link)


class Server:
    """`pretrain dashboard` over a home."""

    def __init__(self, home: Path) -> None:
        words = ["-m", "launch.cli", "dashboard", "--home", str(home), "--port", "0"]
        self.process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = next(line.split()[1] for line in self.process.stdout if line.startswith("dashboard"))

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(20)

    def ask(self, path: str, **query: Any) -> Any:
        address = f"{self.url}{path}?{urllib.parse.urlencode(query)}"
        asked = urllib.request.Request(address, headers={"Accept-Encoding": "gzip"})  # as browsers do
        with urllib.request.urlopen(asked, timeout=300) as answer:
            body = answer.read()
            if answer.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
        return json.loads(body) if path.startswith("api/") else body

    def page(self, *names: str) -> None:
        """Every request that a run's page makes."""
        self.ask("api/run", name=names[0])
        points = min(1200, 2400 // len(names))
        curves = self.ask("api/curves", runs=",".join(names), fields=FIELDS, x="step", points=points, smooth=5)
        kept = curves["curves"][names[-1]]["loss"]["kept"]
        assert len(kept[0]) > 0.8 * points
        self.ask("api/fields")
        self.ask("api/config", runs=",".join(names))

    def cpu_s(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def memory_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)


def _measure_once(home: Path) -> dict[str, float]:
    with Server(home) as server:
        idle = server.memory_bytes()
        found: dict[str, float] = {}
        started, cpu_s = time.perf_counter(), server.cpu_s()

        def note(name: str) -> None:
            found[f"dashboard.{name}_s"] = time.perf_counter() - started
            found[f"dashboard.{name}_cpu_s"] = server.cpu_s() - cpu_s

        server.ask("")
        first = server.ask("api/runs")
        note("first")
        assert first["runs"]
        while server.ask("api/runs")["reading"]:
            time.sleep(0.02)
        note("list")
        for name, runs in (("run", [1]), ("overlay", list(range(2, 10)))):
            started, cpu_s = time.perf_counter(), server.cpu_s()
            server.page(*(f"run-{number:04d}" for number in runs))
            note(name)
        for number in range(10, 50):  # more than are kept
            server.page(f"run-{number:04d}")
        return found | {"dashboard.memory_bytes": float(server.memory_bytes() - idle)}


_DRAWN = """(wanted) => {
  const found = wanted === "list" ? document.querySelectorAll("tbody tr").length > 0
    : document.querySelector("[data-field=loss] canvas") && document.querySelectorAll("canvas").length > 8;
  if (!found) return 0;
  return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now()))));
}"""
"""When what is wanted is on the screen: it is in the page, and a frame has been drawn since. Milliseconds."""


def _browse_once(home: Path, browser: Any) -> dict[str, float]:
    overlaid = ",".join(f"run-{number:04d}" for number in range(3, 10))
    pages = {"list": "", "run": "#/run/run-0001", "overlay": f"#/run/run-0002?with={overlaid}"}
    found: dict[str, float] = {}
    with Server(home) as server:
        for name, where in pages.items():
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            before = _cpu_s_of_children()
            page.goto(f"{server.url}{where}", wait_until="commit")
            drawn = page.wait_for_function(_DRAWN, arg=name, timeout=120_000)
            found[f"dashboard.browser_{name}_s"] = drawn.json_value() / 1000
            found[f"dashboard.browser_{name}_cpu_s"] = _cpu_s_of_children() - before
            page.close()
            while server.ask("api/runs")["reading"]:  # the list would take the processor of the pages after it
                time.sleep(0.02)
    return found


def _cpu_s_of_children() -> float:
    """Of the server and every process of the browser: more than a page takes alone on a machine of several cores."""
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system
    return total


def _browse(home: Path, repetitions: int) -> list[dict[str, float]]:
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        found = [_browse_once(home, browser) for _ in range(repetitions)]
        browser.close()
    return found


PARTS = {"server": "pages by their requests, memory", "browser": "pages in a real Chromium"}


def measure(*, quick: bool, command: str) -> list[Result]:
    """Both parts over one home."""
    return _measure(list(PARTS), quick, command)


def measure_part(part: str, *, quick: bool, command: str) -> list[Result]:
    return _measure([part], quick, command)


def _measure(parts: list[str], quick: bool, command: str) -> list[Result]:
    """Medians of several servers."""
    runs, records, repetitions = (100, 20_000, 1) if quick else (1000, 100_000, 3)
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        make_home(home, runs, records)
        found: list[dict[str, float]] = [{} for _ in range(repetitions)]
        if "server" in parts:
            found = [_measure_once(home) for _ in range(repetitions)]
        if "browser" in parts:
            found = [{**before, **after} for before, after in zip(found, _browse(home, repetitions), strict=True)]
    baseline = f"{runs} runs x {records} records"
    return [
        Result(metric, median([each[metric] for each in found]), "bytes" if "bytes" in metric else "s", baseline,
               None, repetitions, command)
        for metric in found[0]
    ]  # fmt: skip
