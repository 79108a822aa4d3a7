"""Finding, claiming and asking things of a run (cases R17 and R18)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pretrain.config import config_from_dict, describe_changes, load_config, with_overrides
from pretrain.errors import ConfigError, ExitCode, FencedError, LeaseHeldError, RunError
from pretrain.rundir import DamagedFileError, Lease, RunDirectory, list_runs
from pretrain.store import open_store
from tests.rundir.helpers import config, flip_bits, new_run, put_lease, this_process


def contents(run: RunDirectory) -> dict[str, bytes]:
    return {key: run.store.get(key) for key in run.store.list()}


# ------------------------------------------------------------------------------------------- claiming


def test_a_new_run_gets_a_directory_with_its_config(tmp_path: Path) -> None:
    run, changes = RunDirectory.claim(config("first"), resume="never", home=str(tmp_path))
    assert changes == []
    assert (run.name, run.url) == ("first", str(tmp_path / "first"))
    assert run.config() == config("first")
    assert run.store.list() == ["run.yaml"]


def test_a_written_config_can_be_trained_again_under_another_name(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    again = load_config(tmp_path / "tiny" / "run.yaml", ["name=other"], check_files=False)
    assert again == config("other")
    assert run.config() == config()


def test_never_refuses_a_run_that_exists_and_leaves_it_untouched(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.store.put("checkpoints/step-00000005-a001/MANIFEST.json", b"{}")
    before = contents(run)
    with pytest.raises(RunError) as caught:
        RunDirectory.claim(with_overrides(config(), ["optimizer.learning_rate=9"]), resume="never", home=str(tmp_path))
    assert str(caught.value) == (
        f"name=tiny exists already: {tmp_path}/tiny. --resume=never only starts new runs. "
        "Go on with pretrain resume tiny (or --resume auto), or choose another --name."
    )
    assert caught.value.exit_code == ExitCode.USER_ERROR
    assert contents(run) == before


def test_must_refuses_a_run_that_does_not_exist_and_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=rf"^run={tmp_path}/tiny does not exist\. --resume=must only goes on .* --resume auto"
    ):
        RunDirectory.claim(config(), resume="must", home=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_auto_starts_or_goes_on(tmp_path: Path) -> None:
    for _ in range(2):
        run, changes = RunDirectory.claim(config(), resume="auto", home=str(tmp_path))
        assert changes == []
    assert run.config() == config()
    assert RunDirectory.claim(config(), resume="must", home=str(tmp_path))[1] == []


def test_a_place_with_other_files_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "thesis.tex").touch()
    with pytest.raises(RunError, match=r"tiny has no run.yaml but holds thesis.tex. A new run needs an empty place"):
        RunDirectory.claim(config(), resume="auto", home=str(tmp_path))
    (tmp_path / "tiny" / "thesis.tex").unlink()
    new_run(tmp_path)  # an empty folder is as good as none


def test_a_resume_shows_what_changed_and_writes_it_once_the_lease_is_held(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    new = with_overrides(config(), ["optimizer.learning_rate=5e-4", "checkpoint.keep_last=3"])
    before = contents(run)
    run, changes = RunDirectory.claim(new, resume="auto", home=str(tmp_path))
    assert describe_changes(changes) == [
        "optimizer.learning_rate: 0.001 -> 0.0005 (applies from the next step on)",
        "checkpoint.keep_last: 2 -> 3 (changes nothing that is computed)",
    ]
    assert contents(run) == before
    with Lease.acquire(run.store, purpose="training") as lease:
        run.journal(lease)
        assert run.config() == new
        assert RunDirectory.claim(new, resume="must", home=str(tmp_path))[1] == []


def test_a_trainer_that_is_turned_away_changes_nothing(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with Lease.acquire(run.store, purpose="training") as held:
        before = contents(run)
        other, changes = RunDirectory.claim(
            with_overrides(config(), ["optimizer.learning_rate=9"]), resume="auto", home=str(tmp_path)
        )
        assert len(changes) == 1
        with pytest.raises(LeaseHeldError, match=rf"is held by pid {os.getpid()} on "):
            Lease.acquire(other.store, purpose="another")
        assert contents(run) == before
        newer = Lease.acquire(other.store, purpose="another", takeover=True)
        with pytest.raises(FencedError):
            other.journal(held)  # neither under a lease that is lost
        newer.release()
    assert run.config() == config()


def test_a_field_that_a_resume_must_not_change_is_refused_old_to_new(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    before = contents(run)
    new = with_overrides(config(), ["seed=2", "model.num_layers=3", "optimizer.learning_rate=9"])
    with pytest.raises(ConfigError) as caught:
        RunDirectory.claim(new, resume="auto", home=str(tmp_path))
    assert caught.value.problems == [
        f"{field} (refused at a resume). tiny was trained with the old value, and its state would not fit. "
        "Keep the old value or start a new run with another --name."
        for field in ("seed: 1 -> 2", "model.num_layers: 2 -> 3")
    ]
    assert contents(run) == before


def test_a_run_whose_directory_was_renamed_goes_on_under_the_new_name(tmp_path: Path) -> None:
    new_run(tmp_path)
    (tmp_path / "tiny").rename(tmp_path / "renamed")
    run, changes = RunDirectory.claim(config("renamed"), resume="must", home=str(tmp_path))
    assert describe_changes(changes) == ["name: tiny -> renamed (applies from the next step on)"]
    assert RunDirectory.locate(run.url).name == "renamed"


RACER = """
import sys
from pretrain.errors import RunError
from pretrain.rundir import RunDirectory
from tests.rundir.helpers import config
from pretrain.config import with_overrides
mine = with_overrides(config(), ["seed=" + sys.argv[2]])
print("ready", flush=True)
sys.stdin.readline()
try:
    RunDirectory.claim(mine, resume="never", home=sys.argv[1])
    print("won")
except RunError as error:
    print(str(error).split(":")[0])
"""


def test_of_several_that_claim_a_name_at_once_exactly_one_gets_it(tmp_path: Path) -> None:
    home = tmp_path / "home"
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(home), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(3)
    ]
    assert [racer.stdout.readline() for racer in racers if racer.stdout] == ["ready\n"] * 3
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    results = [racer.communicate(timeout=20)[0].strip() for racer in racers]
    assert sorted(results) == ["name=tiny exists already", "name=tiny exists already", "won"]
    assert RunDirectory(open_store(home / "tiny")).config().seed == results.index("won")


# -------------------------------------------------------------------------------------------- finding


def test_a_run_is_found_by_name_path_and_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_run(tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setenv("PRETRAIN_HOME", str(tmp_path / "home"))
    for given in ("tiny", "./tiny", "tiny/", f"{tmp_path}/home/tiny", f"file://{tmp_path}/home/tiny", "../home/tiny"):
        run = RunDirectory.locate(given)
        assert (run.name, run.url) == ("tiny", str(tmp_path / "home" / "tiny"))
    monkeypatch.chdir(tmp_path / "home" / "tiny")
    assert RunDirectory.locate(".").name == "tiny"


def test_the_home_is_runs_below_the_current_directory_unless_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PRETRAIN_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    RunDirectory.claim(config(), resume="never")
    assert RunDirectory.locate("tiny").url == str(tmp_path / "runs" / "tiny")
    monkeypatch.setenv("PRETRAIN_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(RunError, match="There are no runs there yet"):
        RunDirectory.locate("tiny")


def test_a_name_that_does_not_exist_lists_near_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRETRAIN_HOME", str(tmp_path))
    for name in ("quickstart", "base-2017", "other"):
        new_run(tmp_path, name)
    with pytest.raises(RunError) as caught:
        RunDirectory.locate("quikstart")
    assert str(caught.value) == (
        f"run=quikstart does not exist in {tmp_path}. A run is named as in pretrain list. "
        "Near names: quickstart. Give a path, or set PRETRAIN_HOME to look elsewhere."
    )
    assert caught.value.exit_code == ExitCode.USER_ERROR


def test_a_path_that_is_no_run_is_told_in_full(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=rf"^run={tmp_path}/x is not a run: {tmp_path}/x has no run.yaml\."):
        RunDirectory.locate(f"{tmp_path}/x")
    with pytest.raises(RunError, match="run= is empty"):
        RunDirectory.locate("")
    with pytest.raises(RunError, match=r"run='\.tmp-x' is not a run's name"):
        RunDirectory.locate(".tmp-x")


# --------------------------------------------------------------------------------------------- damage


def test_any_flipped_bit_in_run_yaml_is_an_error_that_names_it(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    path = tmp_path / "tiny" / "run.yaml"
    for content in flip_bits(path, every=29):
        path.write_bytes(content)
        with pytest.raises(DamagedFileError) as caught:
            run.config()
        assert str(caught.value).startswith(f"{path} is damaged: its ")
        assert str(caught.value).endswith("to change a config use pretrain resume RUN key=value.")
    with pytest.raises(DamagedFileError, match="is damaged"):
        RunDirectory.claim(config(), resume="auto", home=str(tmp_path))
    assert caught.value.exit_code == ExitCode.USER_ERROR


def test_a_config_of_another_version_is_told_apart_from_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("pretrain.rundir.run_yaml.dump_yaml", lambda config: "name: tiny\nturbo: 1\n")
        run.write_config(config())
    with pytest.raises(
        DamagedFileError, match=r"run.yaml does not fit this version of pretrain: (.|\n)*turbo is not known"
    ):
        run.config()


# ------------------------------------------------------------------------------- requests and attempts


def test_requests_are_seen_in_order_until_they_are_cleared(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run.pending_requests() == []
    before = time.time()
    run.request_stop()
    run.request_stop(now=True)
    requests = run.pending_requests()
    assert [(request.kind, request.now) for request in requests] == [("stop", False), ("stop", True)]
    assert before - 1 <= requests[0].t <= requests[1].t <= time.time() + 1
    assert all(request.key.startswith("control/") and request.key.endswith("-stop.json") for request in requests)
    run.clear_requests()
    run.clear_requests()
    assert run.pending_requests() == []


def test_a_damaged_request_still_asks_to_stop(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.store.put("control/00000000000000000007-stop.json", b"{")
    run.store.put("control/readme.txt", b"not a request")
    assert [(request.kind, request.now) for request in run.pending_requests()] == [("stop", False)]
    run.clear_requests()
    assert run.pending_requests() == []


def test_attempt_numbers_are_never_used_twice(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run.next_attempt() == 1
    with Lease.acquire(run.store, purpose="training") as lease:
        run.journal(lease).append("attempt_started", attempt=1)
    assert run.next_attempt() == 2
    run.store.put(run.metrics_key(4), b"")
    assert run.next_attempt() == 5
    run.store.put(run.log_key(7, 12), b"")
    assert run.next_attempt() == 8
    assert (run.metrics_key(3), run.log_key(3, 7)) == ("metrics/attempt-003.jsonl", "logs/attempt-003/rank-00007.log")
    assert run.checkpoints.url == f"{run.url}/checkpoints"


# --------------------------------------------------------------------------------------------- listing


def test_all_runs_are_listed_and_a_damaged_one_does_not_hide_the_others(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        new_run(tmp_path, name)
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "a" / "run.yaml").write_text("seed: 1\n")
    put_lease(RunDirectory.locate(f"{tmp_path}/c").store, this_process(), time.time())
    runs = list_runs(str(tmp_path))
    assert [(run.name, run.state) for run in runs] == [("a", "damaged"), ("b", "created"), ("c", "created")]
    assert f"{tmp_path}/a/run.yaml is damaged" in str(runs[0].reason)
    assert list_runs(str(tmp_path / "nowhere")) == []


def test_a_run_on_an_object_store_can_be_claimed_and_read() -> None:
    home = f"memory://runs-{time.time_ns()}"
    run, _ = RunDirectory.claim(config(), resume="never", home=home)
    assert RunDirectory.locate(run.url).config() == config_from_dict(config().model_dump())
    assert [status.name for status in list_runs(home)] == ["tiny"]
    with pytest.raises(RunError, match="exists already"):
        RunDirectory.claim(config(), resume="never", home=home)


# ----------------------------------------------------------------------------------------- attempts


def test_only_the_newest_attempt_passes_the_check_before_it_publishes(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.check_attempt(1)  # a run of an older version has opened none
    run.open_attempt(1)
    run.check_attempt(1)
    run.open_attempt(2)
    run.check_attempt(2)
    with pytest.raises(FencedError, match=r"attempt 2 of .* is newer than attempt 1 of this process"):
        run.check_attempt(1)
