"""The lines of `pretrain train` while it trains, from metrics files that grow by hand."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from launch import progress
from launch.progress import Progress
from pretrain.rundir import RunDirectory
from tests.launch.runs import config_for

VALIDATION = {"loss": 3.0, "perplexity": 20.1, "bits_per_byte": 1.5, "target_tokens": 10, "target_bytes": 30}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setattr(progress, "LOCAL_EVERY_S", 0.0)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    made, _ = RunDirectory.claim(config_for(tmp_path, fake={"steps": 9}), resume="never", home=str(tmp_path / "home"))
    return made


def grow(run: RunDirectory, attempt: int, *steps: int, torn: str = "") -> None:
    lines = [json.dumps({"t": 1.0, "step": step, "loss": 4.0 - step / 10, "learning_rate": 0.1}) for step in steps]
    run.store.append(run.metrics_key(attempt), "".join(line + "\n" for line in lines).encode() + torn.encode())


def shown(stream: io.StringIO) -> list[str]:
    """Which step each line is of."""
    text = stream.getvalue()
    stream.seek(0)
    stream.truncate()
    return [line.split("/")[0].split()[-1] for line in text.splitlines()]


def test_each_record_is_shown_once_and_a_line_that_is_not_finished_later(run: RunDirectory) -> None:
    stream = io.StringIO()
    looked = Progress(run, 9, stream)
    looked.show(1)
    assert shown(stream) == []
    grow(run, 1, 1, 2, torn='{"t": 1.0, "step": 3, "lo')
    looked.show(1)
    assert shown(stream) == ["1", "2"]
    run.store.append(run.metrics_key(1), b'ss": 3.5, "learning_rate": 0.1}\n')
    looked.show(1)
    looked.show(1, last=True)
    assert shown(stream) == ["3"]


def test_a_run_that_goes_on_does_not_show_again_what_its_earlier_attempts_did(run: RunDirectory) -> None:
    grow(run, 1, 1, 2, 3)
    run.store.append(run.metrics_key(1), json.dumps({"t": 1.0, "step": 3, "validation": {"a": VALIDATION}}).encode())
    stream = io.StringIO()
    looked = Progress(run, 9, stream, after=run.next_attempt() - 1)
    looked.show(1)  # the controller's newest attempt until it starts its own
    looked.show(1, last=True)  # it was ended before
    assert shown(stream) == []
    grow(run, 2, 3, 4)
    looked.show(2, last=True)
    assert shown(stream) == ["3", "4"]


def test_steps_that_come_faster_than_lines_share_one_and_the_last_is_shown(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 60.0)
    stream = io.StringIO()
    looked = Progress(run, 9, stream)
    grow(run, 1, 1, 2, 3)
    looked.show(1)
    assert shown(stream) == ["1"]
    looked.show(1, last=True)
    assert shown(stream) == ["3"]
