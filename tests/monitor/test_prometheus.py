"""What Prometheus gets: checked by promtool, alerts unit-tested; test_planted asks every query of a real Prometheus.

Needs the Debian package `prometheus` (tests/system_packages brings it). Without it these tests are
skipped by name, except in continuous integration, where that is a failure.
"""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from launch.monitor.ledger import Kind
from launch.monitor.prometheus import SERIES
from pretrain.rundir import this_process
from tests.monitor.journals import Journal, step, validation
from tests.monitor.prometheus_server import DASHBOARD, FILES, QUERIES, program
from tests.monitor.runs import write_run
from tests.monitor.test_ledger import calm
from tests.monitor.test_server import get, serving

HERE = Path(__file__).parent


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
        "balance_loss": 2.5,
        "router_z_loss": 0.75,
        "largest_expert_share": 0.375,
        "idle_experts": 3,
    }
    held_out = validation(now - 4, 60, 1.0)
    held_out["validation"]["text"]["bits_per_byte"] = 1.25
    held_out["validation"]["translation"] = {"bleu": 21.5, "chrf": 44.0, "sentences": 50}
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
    experts = ("expert_balance_loss", "router_z_loss", "largest_expert_share_ratio", "idle_experts")
    assert [found[f"pretrain_{name}", 'run="alive"'] for name in experts] == [2.5, 0.75, 0.375, 3]
    translated = [found[f"pretrain_validation_{name}", 'run="alive",source="translation"'] for name in ("bleu", "chrf")]
    assert translated == [21.5, 44.0]
    assert found["pretrain_run_state", 'run="calm",state="completed"'] == 1
    assert {name for name, labels in found if "calm" in labels} == {"pretrain_run_state"}
    spent = [value for (name, _), value in found.items() if name == "pretrain_spent_seconds"]
    assert len(spent) == len(Kind)
    assert sum(spent) == pytest.approx(100.0, abs=5.0)
    assert {name for name, _ in found} <= set(SERIES)
    assert found["pretrain_restarts_total", 'run="alive",cause="application"'] == 1
    assert 9 < found["pretrain_restart_seconds_total", 'run="alive",cause="application"'] < 25
    assert found["pretrain_restart_seconds_total", 'run="alive",cause="node"'] == 0
    assert found["pretrain_checkpoint_whole", 'run="alive"'] == 0  # the journal tells of one that is not there


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
    assert len(alerts) == 9
    for alert in alerts:
        firing = re.findall(rf"alertname: {alert}\n +eval_time: \w+\n +exp_alerts:\n +- exp_labels", tests.read_text())
        assert firing, alert


def test_the_grafana_dashboard_uses_only_series_that_are_exported() -> None:
    used = {name for _, query in QUERIES for name in re.findall(r"pretrain_\w+", query)}
    used |= set(re.findall(r"pretrain_\w+", (FILES / "alerts.yaml").read_text()))
    assert used <= set(SERIES)
    idents = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(idents)) == len(idents) == 26
    cells = [
        (x, y)
        for box in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(box["x"], box["x"] + box["w"])
        for y in range(box["y"], box["y"] + box["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23
