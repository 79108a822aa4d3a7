"""A build on a Ray of two nodes: the bytes of one machine, also when a worker and the builder are killed."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pretrain.data.build import build
from tests.data_build.corpus import file_hashes, numbered_texts, text_options, write_jsonl
from tests.launch.two_nodes import two_nodes

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.timeout(390), pytest.mark.slow]  # a cluster of two nodes; make test-cluster runs it


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, psutil.Process]]:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with two_nodes() as (told, process):
        yield told["address"], process


@pytest.fixture
def corpus(texts: Path) -> Path:
    for number in range(3):
        write_jsonl(texts / f"{number}.jsonl", [{"text": text} for text in numbered_texts(1500, seed=number)])
    return texts


def start_build(corpus: Path, out: Path, tokenizer: str, address: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "launch.cli", "data", "build", str(corpus), "--out", str(out), "--json",
               "--tokenizer", tokenizer, "--name", "same", "--block-tokens", "256", "--shard-blocks", "64",
               "--ray", "--address", address, "--no-plot", "--memory", "2MB"]  # fmt: skip
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_build_on_ray_gives_the_same_bytes_also_when_a_worker_and_then_the_builder_is_killed(
    tmp_path: Path, corpus: Path, tokenizer_path: str, cluster: tuple[str, psutil.Process]
) -> None:
    address, nodes = cluster
    build(text_options(corpus, tmp_path / "calm", tokenizer_path, name="same", block_tokens=256, shard_blocks=64))
    torn = tmp_path / "torn"
    with start_build(corpus, torn, tokenizer_path, address) as process:
        killed = _kill_a_worker_in_mid_build(torn.with_name("torn.partial"), nodes, process)
        done = _kill_the_builder_after_some_tasks(torn.with_name("torn.partial"), process)
        errors = process.communicate(timeout=60)[1]
    assert killed, f"no worker was killed while it worked: {errors}"
    assert process.returncode == -signal.SIGKILL, errors
    assert not torn.exists()
    with start_build(corpus, torn, tokenizer_path, address) as process:
        output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    report = json.loads(output)
    assert done <= report["reused_tasks"] < report["tasks"]
    assert file_hashes(torn) == file_hashes(tmp_path / "calm")
    assert not torn.with_name("torn.partial").exists()


def _kill_the_builder_after_some_tasks(partial: Path, build: subprocess.Popen[str], least: int = 3) -> int:
    """Kills it when it has encoded so much; gives how many tasks were done by then."""
    while build.poll() is None:
        done = len(list(partial.glob("work/encode-*/done/*.json")))
        if done >= least:
            build.kill()
            return done
        time.sleep(0.005)
    return 0


def _kill_a_worker_in_mid_build(partial: Path, nodes: psutil.Process, build: subprocess.Popen[str]) -> bool:
    """Kills the first process that runs a task once the encoding has begun."""
    while build.poll() is None:
        if list(partial.glob("work/encode-*/items.json")):
            for process in nodes.children(recursive=True):
                try:
                    if "_run_row" in process.name() or "ray::Map" in " ".join(process.cmdline()):
                        os.kill(process.pid, signal.SIGKILL)
                        return True
                except psutil.Error:
                    continue
        time.sleep(0.02)
    return False


def test_a_cluster_that_is_not_there_is_an_error_with_what_to_do(
    tmp_path: Path, texts: Path, tokenizer_path: str
) -> None:
    (texts / "a.txt").write_text("text")
    command = [sys.executable, "-m", "launch.cli", "data", "build", str(texts), "--out", str(tmp_path / "out"),
               "--tokenizer", tokenizer_path, "--ray", "--address", "127.0.0.1:1"]  # fmt: skip
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2, result.stderr
    assert "no Ray cluster can be joined there" in result.stderr
    assert "Traceback" not in result.stderr
