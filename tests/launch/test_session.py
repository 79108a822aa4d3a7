"""Whatever ends a process that holds a run is the run's last word."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from launch.session import hold_run
from pretrain.errors import StoreError
from pretrain.log import Log
from pretrain.rundir import EventKind, JournalWriter, RunDirectory
from tests.launch.runs import config_for


@pytest.mark.parametrize("kept", [True, False])
def test_a_stop_that_was_sent_before_the_driver_began_is_kept_for_it(tmp_path: Path, kept: bool) -> None:
    config = config_for(tmp_path, fake={"steps": 1})
    run, changes = RunDirectory.claim(config, resume="never", home=str(tmp_path / "home"))
    run.request_stop()
    log = Log(stream=io.StringIO())
    with hold_run(run, changes, purpose="test", takeover=False, log=log, keep_requests=kept):
        assert len(run.pending_requests()) == kept


@pytest.mark.parametrize(
    ("end", "seen", "word"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, "interrupted"),
        (SystemExit(15), KeyboardInterrupt, "interrupted"),  # Ray's own handler of SIGTERM
        (StoreError("disk full"), StoreError, "failed"),
    ],
    ids=["Ctrl-C", "SIGTERM while Ray starts", "an error"],
)
def test_the_end_of_a_holder_is_journaled_and_the_lease_given_back(
    tmp_path: Path, end: BaseException, seen: type[BaseException], word: str
) -> None:
    config = config_for(tmp_path, fake={"steps": 1})
    run, changes = RunDirectory.claim(config, resume="never", home=str(tmp_path / "home"))
    with (
        pytest.raises(seen),
        hold_run(run, changes, purpose="test", takeover=False, log=Log(stream=io.StringIO())),
    ):
        raise end
    assert run.events()[-1].kind == word
    assert run.status().state == word


def test_a_holder_that_is_interrupted_without_its_store_ends_as_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, changes = RunDirectory.claim(config_for(tmp_path, fake={"steps": 1}), resume="never", home=str(tmp_path))

    def fail(journal: JournalWriter, kind: EventKind, **fields: Any) -> None:
        raise StoreError("no network")

    holder = hold_run(run, changes, purpose="test", takeover=False, log=Log(stream=io.StringIO()))
    holder.__enter__()
    monkeypatch.setattr(JournalWriter, "append", fail)
    with pytest.raises(KeyboardInterrupt):
        holder.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
