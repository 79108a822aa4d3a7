"""SkyPilot's own parser takes the rendered task and finds in it what the config says. Slow: it installs SkyPilot.

Half a gigabyte of packages that want other versions than ours, so they lie in a venv of their own, made once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.launch.rendered import rendered
from tests.launch.runs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
VENV = ROOT / ".venv-skypilot"
REQUIREMENT = "skypilot==0.14.1"
PARSE = """
import json, sys
import sky, yaml
with open(sys.argv[1]) as file:
    task = sky.Task.from_yaml_config(yaml.safe_load(file), secrets_overrides=[("RAY_AUTH_TOKEN", "t")])
(resources,) = task.resources
print(json.dumps({"name": task.name, "nodes": task.num_nodes, "accelerators": resources.accelerators,
                  "spot": resources.use_spot, "region": resources.region, "cloud": str(resources.cloud)}))
"""


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of the venv."""
    if not (VENV / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
        subprocess.run([str(VENV / "bin" / "pip"), "install", "--quiet", REQUIREMENT], check=True)
        (VENV / "made").touch()
    return VENV / "bin" / "python"


def parse(python: Path, folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "task.yaml").write_text(text)
    environment = {**os.environ, "HOME": str(folder), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    environment.pop("PYTHONPATH", None)
    words = [str(python), "-c", PARSE, str(folder / "task.yaml")]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)


def test_skypilot_reads_the_task_as_the_config_means_it(python: Path, tmp_path: Path) -> None:
    parsed = parse(python, tmp_path, rendered("skypilot"))
    assert parsed.returncode == 0, parsed.stderr[-3000:]
    assert json.loads(parsed.stdout.splitlines()[-1]) == {
        "name": yaml.safe_load(rendered("skypilot"))["name"],
        "nodes": 5,  # 30 ranks on nodes of 8, and a spare
        "accelerators": {"H100": 8},
        "spot": True,
        "region": "us-east-1",
        "cloud": "AWS",
    }


def test_skypilot_refuses_a_key_that_it_does_not_know(python: Path, tmp_path: Path) -> None:
    parsed = parse(python, tmp_path, rendered("skypilot").replace("num_nodes:", "num_node:"))
    assert parsed.returncode != 0
    assert "num_nodes" in parsed.stderr
