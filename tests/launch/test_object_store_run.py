"""A run whose directory is in an object store, on a Ray of this machine: what its ranks said last is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.store import open_store
from tests.data_build.servers import s3_server
from tests.launch.runs import ROOT, write_config

pytestmark = pytest.mark.timeout(300)

RANK = "import sys, time; print('first word', flush=True); time.sleep(0.5); print('the traceback'); sys.exit(2)"


def test_the_last_words_of_a_rank_are_in_the_store_when_the_command_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config(tmp_path, "run", fake={"steps": 5})
    with s3_server("moto", tmp_path / "s3", monkeypatch) as url:
        home = f"{url}/runs"
        command = [sys.executable, "-m", "launch.cli", "train", str(config)]
        own = {"PRETRAIN_HOME": home, "PRETRAIN_RANK_COMMAND": json.dumps([sys.executable, "-c", RANK])}
        environment = {**os.environ, **own, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 2, done.stderr
        assert "not tried again, the input is wrong" in done.stderr
        store = open_store(f"{home}/run")
        logs = [store.get(f"logs/attempt-001/rank-0000{rank}.log").splitlines() for rank in range(2)]
    assert b"the traceback" in [line for log in logs for line in log[-1:]]
