"""What Prometheus gets: checked by promtool, asked through a real Prometheus, alerts unit-tested.

Needs the Debian package `prometheus` (tests/system_packages brings it). Without it these tests are
skipped by name, except in continuous integration, where that is a failure.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from launch.monitor.ledger import Kind
from launch.monitor.prometheus import SERIES
from pretrain.rundir import this_process
from tests.monitor.journals import Journal, step, validation
from tests.monitor.runs import write_run
from tests.monitor.test_ledger import calm
from tests.monitor.test_server import get, serving

HERE = Path(__file__).parent
FILES = HERE.parents[1] / "launch" / "monitor" / "alerting"
DASHBOARD = json.loads((FILES / "grafana.json").read_text())
QUERIES = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        missing = f"no {name} on PATH: alerts and queries were not tested. Run tests/system_packages"
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)
    return found


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """`alive`, killed once and running again; `calm`, which has ended."""
    now = time.time() - 1000.0
    journal = Journal().at(now - 100, "created").at(now - 100, "attempt_started", attempt=1, ranks=2)
    journal.at(now - 80, "committed", attempt=1, step=10, checkpoint="step-00000010-a001")
    journal.at(now - 70, "fault", attempt=1, cause="application", rank=1, message="killed")
    journal.at(now - 69, "attempt_started", attempt=2, ranks=2).at(now - 60, "restored", attempt=2, step=10)
    row = {
        **step(now - 5, 60, 1.0),
        "learning_rate": 3e-4,
        "gradient_norm": 1.5,
        "mfu": 0.4,
        "eta_s": 90.0,
        "tokens": 600,
    }
    held_out = validation(now - 4, 60, 1.0)
    held_out["validation"]["text"]["bits_per_byte"] = 1.25
    write_run(tmp_path, "alive", journal.events, {1: [step(now - 75, 12, 1.0)], 2: [row, held_out]}, this_process())
    ended, records = calm()
    write_run(tmp_path, "calm", ended.events, records)
    return tmp_path


def samples(text: str) -> dict[tuple[str, str], float]:
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, labels, value = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line).groups()  # type: ignore[union-attr]
            found[name, labels or ""] = float(value)
    return found


def test_a_living_run_has_every_series_and_an_ended_one_its_state(home: Path) -> None:
    with serving(home) as server:
        answer = get(server, "/metrics")
    found = samples(answer.body.decode())
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert found["pretrain_step", 'run="alive"'] == 60
    assert found["pretrain_checkpoint_step", 'run="alive"'] == 10
    assert found["pretrain_faults_total", 'run="alive",cause="application"'] == 1
    assert found["pretrain_faults_total", 'run="alive",cause="node"'] == 0
    assert found["pretrain_validation_bpb", 'run="alive",source="text"'] == 1.25
    assert found["pretrain_run_state", 'run="calm",state="completed"'] == 1
    assert {name for name, labels in found if "calm" in labels} == {"pretrain_run_state"}
    spent = [value for (name, _), value in found.items() if name == "pretrain_spent_seconds"]
    assert len(spent) == len(Kind)
    assert sum(spent) == pytest.approx(100.0, abs=5.0)
    assert {name for name, _ in found} == set(SERIES) - {"pretrain_skipped_steps"}  # no record here tells of any


def test_promtool_finds_nothing_wrong_with_series_rules_and_config(home: Path) -> None:
    promtool = program("promtool")
    with serving(home) as server:
        text = get(server, "/metrics").body
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, timeout=30)
    assert (done.returncode, done.stderr.decode()) == (0, "")
    done = subprocess.run([promtool, "check", "config", FILES / "prometheus.yaml"], capture_output=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_each_alert_fires_for_its_trouble_and_not_for_a_calm_run() -> None:
    tests = HERE / "alerts_test.yaml"
    done = subprocess.run([program("promtool"), "test", "rules", tests], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    alerts = re.findall(r"- alert: (\w+)", (FILES / "alerts.yaml").read_text())
    assert len(alerts) == 7
    for alert in alerts:
        firing = re.findall(rf"alertname: {alert}\n +eval_time: \w+\n +exp_alerts:\n +- exp_labels", tests.read_text())
        assert firing, alert


def test_every_panel_of_the_grafana_dashboard_has_data_in_a_real_prometheus(home: Path, tmp_path: Path) -> None:
    binary = program("prometheus")
    with serving(home) as server, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        config = tmp_path / "prometheus.yaml"
        config.write_text(
            f"global: {{scrape_interval: 1s}}\nrule_files: ['{FILES / 'alerts.yaml'}']\n"
            "scrape_configs: [{job_name: pretrain, static_configs: [{targets: "
            f"['{urllib.parse.urlsplit(server.url).netloc}']}}]}}]\n"
        )
        words = [binary, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]
        log = (tmp_path / "prometheus.log").open("w")
        process = subprocess.Popen([*words, f"--web.listen-address={address}"], stdout=log, stderr=log)
        try:
            _wait_for(address, "pretrain_goodput_ratio", tmp_path / "prometheus.log")
            empty = []
            for title, query in QUERIES:
                result = ask(address, query.replace("$run", ".*"))
                if not result:
                    empty.append((title, query))
            assert empty == []
            assert ask(address, "pretrain_step / pretrain_total_steps")[0]["metric"]["run"] == "alive"
        finally:
            process.terminate()
            process.wait(timeout=20)
            log.close()


def test_the_grafana_dashboard_uses_only_series_that_are_exported() -> None:
    used = {name for _, query in QUERIES for name in re.findall(r"pretrain_\w+", query)}
    used |= set(re.findall(r"pretrain_\w+", (FILES / "alerts.yaml").read_text()))
    assert used <= set(SERIES)
    idents = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(idents)) == len(idents) == 14
    cells = [
        (x, y)
        for box in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(box["x"], box["x"] + box["w"])
        for y in range(box["y"], box["y"] + box["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23


def ask(address: str, query: str) -> list[dict[str, Any]]:
    url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=10) as response:
        answer = json.load(response)
    assert answer["status"] == "success"
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result


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
