"""The memory tier in whole runs: a kill goes on from it bit for bit, damage costs nothing but time, nothing stays."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest

from pretrain.checkpoint import list_checkpoints, weights_sha256
from pretrain.checkpoint.memory import MemoryTier
from pretrain.config.schema import CheckpointConfig
from pretrain.errors import UserError
from pretrain.rundir import RunDirectory
from pretrain.rundir.memory_folders import MemoryOwner
from pretrain.store import open_store
from pretrain.topology import World
from pretrain.train.memory import _check_room
from tests.checkpoint.test_format import FakeEngine
from tests.tiny import Tiny, build_tiny, steps_of

ROOT = Path(__file__).resolve().parents[2]
STEPS, DURABLE = 40, 20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build_tiny(tmp_path_factory.mktemp("tiny"))


def _spawn(home: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pretrain", *arguments],
        cwd=ROOT,
        env={**os.environ, "PRETRAIN_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 0, output
    return output


def _arguments(tiny: Tiny, name: str, ram: Path | None, *more: str) -> list[str]:
    steps = (f"name={name}", f"schedule.total_steps={STEPS}", f"checkpoint.every_steps={DURABLE}")
    tier = ("checkpoint.ram_every_steps=2", f"checkpoint.ram_directory={ram}") if ram else ()
    return tiny.decoder(*steps, *tier, *more)


def _kill_with_copies(tiny: Tiny, home: Path, name: str, ram: Path) -> None:
    """Kills a run without warning when memory holds a newer copy than the disk."""
    process = _spawn(home, *_arguments(tiny, name, ram))
    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        copies = [key for key in open_store(ram).list() if key.endswith("rank-00000.part.json")]
        if any(f"/step-000000{step}" in key for step in range(DURABLE + 4, STEPS) for key in copies):
            break
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert max(steps_of(home / name)) < STEPS


def _weights(home: Path, name: str) -> str:
    run = RunDirectory.locate(str(home / name))
    return weights_sha256(run.checkpoints, list_checkpoints(run.checkpoints)[0].name)


def _restored(home: Path, name: str) -> list[dict[str, object]]:
    return [event.fields for event in RunDirectory.locate(str(home / name)).events() if event.kind == "restored"]


def test_a_killed_run_goes_on_from_memory_or_without_it_from_disk_bit_for_bit(tiny: Tiny, tmp_path: Path) -> None:
    untouched = _spawn(tmp_path, *_arguments(tiny, "untouched", None))
    rams = {name: tmp_path / f"ram-{name}" for name in ("damaged", "whole")}
    rams["whole"].mkdir()
    _kill_with_copies(tiny, tmp_path, "whole", rams["whole"])
    assert len({path.parent for path in rams["whole"].rglob("*.safetensors")}) <= 2
    _finish(untouched)
    shutil.copytree(rams["whole"], rams["damaged"])
    shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
    for path in rams["damaged"].rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 8
        path.write_bytes(data)
    going = {name: _spawn(tmp_path, *_arguments(tiny, name, ram, "--resume", "must")) for name, ram in rams.items()}
    for name, ram in rams.items():
        output = _finish(going[name])
        (restored,) = _restored(tmp_path, name)
        if name == "whole":
            assert restored["tier"] == "memory"
            assert int(str(restored["step"])) > DURABLE
        else:
            assert (restored["tier"], restored["step"]) == ("durable", DURABLE)
            assert "does not match its sha256" in output
        assert _weights(tmp_path, name) == _weights(tmp_path, "untouched")
        assert steps_of(tmp_path / name).keys() == steps_of(tmp_path / "untouched").keys()
        assert list(ram.iterdir()) == []  # the end of the run gives its memory back


def test_a_directory_that_does_not_hold_two_copies_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = MemoryTier.open(tmp_path, MemoryOwner("/run", "1"), World())
    config = CheckpointConfig(every_steps=5, ram_every_steps=2, ram_directory=str(tmp_path))
    _check_room(config, tier, FakeEngine(), World())  # type: ignore[arg-type]
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(1000, 0, 500))
    # 34 weights with two moments of four bytes each and two pages for header and alignment, twice: 17,200 bytes.
    with pytest.raises(UserError, match=r"ram_every_steps=2 needs 0\.0172 MB in .* \(2 copies for 1 ranks\)"):
        _check_room(config, tier, FakeEngine(), World())  # type: ignore[arg-type]


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"checkpoint\.ram_directory=.*absent on .* cannot be used: No such file"):
        MemoryTier.open(tmp_path / "absent", MemoryOwner("/run", "1"), World())
