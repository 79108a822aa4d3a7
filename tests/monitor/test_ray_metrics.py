"""Series through Ray: the same as the dashboard's, and provisioning that stands beside what Ray generates."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from launch.monitor.prometheus import run_samples
from launch.monitor.ray_metrics import RayMetrics
from launch.monitor.reader import RunReader
from pretrain.rundir import RunDirectory
from tests.monitor.prometheus_server import DASHBOARD, FILES, program
from tests.monitor.runs import write_run
from tests.monitor.test_ledger import calm

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    journal, records = calm()
    return write_run(tmp_path, "calm", journal.events, records)


def test_every_series_of_a_run_is_handed_to_ray(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    handed: dict[tuple[str, str], float] = {}

    class Gauge:
        def __init__(self, name: str, description: str = "", tag_keys: tuple[str, ...] | None = None) -> None:
            self.name, self.keys = name, tag_keys or ()
            assert description

        def set(self, value: float, tags: dict[str, str] | None = None) -> None:
            assert set(tags or {}) <= set(self.keys)
            handed[self.name, json.dumps(tags, sort_keys=True)] = value

    monkeypatch.setattr("ray.util.metrics.Gauge", Gauge)
    metrics = RayMetrics(run)
    count = metrics.export()
    reader = RunReader(run)
    reader.refresh()
    expected = {
        (name, json.dumps(labels, sort_keys=True)): value
        for name, samples in run_samples(reader).items()
        for labels, value in samples
    }
    assert handed == expected
    assert count == len(expected) > 20
    assert handed["pretrain_loss", '{"run": "calm"}'] == 2.0


_PROGRAM = """
import sys, time, urllib.request, json, ray
from pathlib import Path
from launch.monitor.ray_metrics import RayMetrics
from pretrain.rundir import RunDirectory
context = ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=sys.argv[2])
metrics = RayMetrics(RunDirectory.locate(sys.argv[1]))
ports = [node["MetricsExportPort"] for node in ray.nodes()]
deadline = time.monotonic() + 120
while time.monotonic() < deadline:
    metrics.export()
    for port in ports:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
        if "ray_pretrain_loss" in text:
            print("\\n".join(line for line in text.splitlines() if "pretrain" in line and not line.startswith("#")))
            ray.shutdown()
            sys.exit(0)
    time.sleep(1)
sys.exit(1)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_real_ray_exports_them(run: RunDirectory, tmp_path: Path) -> None:
    words = [sys.executable, "-c", _PROGRAM, str(tmp_path / "calm"), f"/tmp/ray-metrics-{time.time_ns()}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    loss = [line for line in done.stdout.splitlines() if line.startswith("ray_pretrain_loss{")]
    assert any('run="calm"' in line and line.endswith(" 2.0") for line in loss), done.stdout


def test_provisioning_stands_beside_what_ray_generates() -> None:
    from ray.dashboard.modules.metrics import templates

    theirs = yaml.safe_load(templates.DASHBOARD_PROVISIONING_TEMPLATE.format(dashboard_output_folder="/x"))
    source = yaml.safe_load(templates.GRAFANA_DATASOURCE_TEMPLATE("Prometheus", "http://127.0.0.1:9090", {}, {}))
    ours = yaml.safe_load((FILES / "provisioning" / "pretrain.yaml").read_text())
    assert ours["apiVersion"] == theirs["apiVersion"]
    assert set(theirs["providers"][0]) <= set(ours["providers"][0])
    assert {ours["providers"][0][key] for key in ("name", "folder")} & {"Ray"} == set()
    assert ours["providers"][0]["options"]["path"] == "$PRETRAIN_ALERTING/grafana.json"
    chooser = DASHBOARD["templating"]["list"][0]
    assert (chooser["type"], chooser["query"]) == ("datasource", source["datasources"][0]["type"])
    scraped = yaml.safe_load(
        templates.PROMETHEUS_YML_TEMPLATE.format(
            prom_metrics_service_discovery_file_path="prom_metrics_service_discovery.json"
        )
    )["scrape_configs"][0]
    config = yaml.safe_load((FILES / "prometheus-with-ray.yaml").read_text())
    (mine,) = (job for job in config["scrape_configs"] if job["job_name"] == scraped["job_name"])
    assert mine["file_sd_configs"] == scraped["file_sd_configs"]
    words = [program("promtool"), "check", "config", str(FILES / "prometheus-with-ray.yaml")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
