"""Runs for these tests: a config whose ranks are `fake_rank`, the CLI as a subprocess."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from pretrain.config import RunConfig, load_config

ROOT = Path(__file__).parents[2]
RANK_COMMAND = [sys.executable, str(Path(__file__).with_name("fake_rank.py"))]


def write_config(folder: Path, name: str = "run", *, fake: dict[str, Any], **cluster: Any) -> Path:
    """A whole config on disk, its data and tokenizer present by name only: fake ranks read neither."""
    (folder / "tokenizer.json").write_text("{}")
    (folder / "source").mkdir(exist_ok=True)
    (folder / "source" / "manifest.json").write_text("{}")
    body = {
        "name": name,
        "seed": 1,
        "tokenizer": str(folder / "tokenizer.json"),
        "data": {"sources": {"text": {"path": str(folder / "source")}}},
        "model": {
            "family": "decoder",
            "vocabulary_size": 300,
            "width": 32,
            "num_heads": 2,
            "num_layers": 2,
            "feed_forward_width": 64,
        },
        "batch": {"global_batch_size": 4, "micro_batch_size": 2, "sequence_length": 32},
        "optimizer": {"kind": "adamw", "learning_rate": 1e-3},
        "schedule": {"kind": "constant", "total_steps": int(fake["steps"])},
        "checkpoint": {"every_steps": 5},
        "cluster": {
            "num_ranks": 2,
            "backoff_s": 0.1,
            "standbys": False,
            "environment": {"FAKE": json.dumps(fake), "PYTHONPATH": str(ROOT)},
            **cluster,
        },
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(body))
    return path


def config_for(folder: Path, name: str = "run", *, fake: dict[str, Any], **cluster: Any) -> RunConfig:
    return load_config(write_config(folder, name, fake=fake, **cluster))


def environment(home: Path) -> dict[str, str]:
    """Of a CLI process whose ranks are fake."""
    return {
        **os.environ,
        "PRETRAIN_HOME": str(home),
        "PRETRAIN_RANK_COMMAND": json.dumps(RANK_COMMAND),
        "PYTHONPATH": str(ROOT),
    }


def start_cli(home: Path, *words: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "launch.cli", *words],
        env=environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **more,
    )


def run_cli(home: Path, *words: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    with start_cli(home, *words) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
