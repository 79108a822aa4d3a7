"""A real Prometheus over a dashboard, and the queries that people will ask it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.missing import did_not_run

FILES = Path(__file__).parents[2] / "launch" / "monitor" / "alerting"
DASHBOARD = json.loads((FILES / "grafana.json").read_text())
QUERIES = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]


def program(name: str) -> str:
    """Its path; skips by name where it is missing, which in continuous integration is a failure."""
    found = shutil.which(name)
    if found is None:
        did_not_run(f"no {name} on PATH for alerts and queries. Run tests/system_packages")
    return found


@contextmanager
def prometheus(target: str, folder: Path, series: str = "pretrain_goodput_ratio") -> Iterator[str]:
    """Scrapes `target` every second and evaluates the alerts; gives its address once it has `series`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = folder / "prometheus.yaml"
    config.write_text(
        f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: ['{FILES / 'alerts.yaml'}']\n"
        f"scrape_configs: [{{job_name: pretrain, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    words = [program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*words, f"--web.listen-address={address}"], stdout=log, stderr=log)
        try:
            _wait_for(address, series, folder / "prometheus.log")
            yield address
        finally:
            process.terminate()
            process.wait(timeout=20)


def ask(address: str, query: str, *, path: str = "query") -> Any:
    """The result of a query; of another path the whole answer as text."""
    asked = f"?{urllib.parse.urlencode({'query': query})}" if path == "query" else ""
    with urllib.request.urlopen(f"http://{address}/api/v1/{path}{asked}", timeout=10) as response:
        text = response.read().decode()
    if path != "query":
        return text
    answer = json.loads(text)
    assert answer["status"] == "success"
    return answer["data"]["result"]


def _wait_for(address: str, series: str, log: Path) -> None:
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        try:
            if ask(address, series):
                return
        except OSError:
            pass
        time.sleep(0.1)
    pytest.fail(f"Prometheus never had {series}:\n{log.read_text()[-2000:]}")
