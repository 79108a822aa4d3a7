"""The memory tier: what counts as complete over nodes, what is read from where, and who gives the memory back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.rundir import RunDirectory
from pretrain.rundir.memory_folders import (
    MemoryOwner,
    memory_folders,
    remove_orphans,
    run_uuid,
    write_owner,
)
from pretrain.rundir.process import ProcessIdentity, identify_process
from pretrain.rundir.run_yaml import encode_config
from pretrain.store import open_store
from tests.checkpoint import ranks_memory
from tests.ranks import RankResult, run_ranks
from tests.rundir.helpers import config

NEWER, OLDER = "step-00000002-a001", "step-00000001-a001"


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[RankResult]:
    arguments = {"folder": str(tmp_path_factory.mktemp("memory"))}
    return run_ranks(ranks_memory.both, ranks=3, arguments=arguments, timeout_s=120)


def test_ranks_on_the_same_places_read_their_own_files_bit_for_bit(three: list[RankResult]) -> None:
    for rank in three:
        assert rank.value["several_nodes"]["same places"] == [NEWER, True, [], True, []]
        assert rank.value["several_nodes"]["partner"]
    assert [rank.value["several_nodes"]["leader"] for rank in three] == [True, False, True]
    assert [rank.value["several_nodes"]["ranks_here"] for rank in three] == [[0, 1], [0, 1], [2]]


@pytest.mark.parametrize("case", ["stage 0", "stage 3", "moved"])
def test_what_lies_on_another_node_is_read_from_there(three: list[RankResult], case: str) -> None:
    for rank in three:
        assert rank.value["several_nodes"][case] == [NEWER, True, [], True, []]


def test_without_partners_a_lost_node_is_told_by_its_ranks_and_the_durable_one_is_used(three: list[RankResult]) -> None:
    for rank in three:
        name, from_memory, skipped, equal, _ = rank.value["several_nodes"]["lost node"]
        assert (name, from_memory, equal) == (OLDER, False, True)
        assert skipped == [[f"{NEWER} in memory", "no living node holds the files of ranks [2]"]]


def test_one_flipped_bit_on_one_node_makes_all_use_the_durable_one(three: list[RankResult]) -> None:
    for rank in three:
        name, from_memory, skipped, equal, _ = rank.value["several_nodes"]["flipped bit"]
        assert (name, from_memory, equal) == (OLDER, False, True)
        assert "rank-00002.safetensors does not match its sha256" in skipped[0][1]


def test_with_partners_each_of_three_nodes_may_be_lost(three: list[RankResult]) -> None:
    for number, rank in enumerate(three):
        guest = (number - 1) % 3
        kept = {f"rank-0000{r}{suffix}" for r in (number, guest) for suffix in (".safetensors", ".part.json")}
        assert set(rank.value["partners"]["files"]) == kept
        for lost in range(3):
            assert rank.value["partners"][f"node {lost} lost"] == [[True, 2], True, [], []]


def test_of_two_copies_the_good_one_is_used_and_without_one_the_weights_stay_as_they_were(
    three: list[RankResult],
) -> None:
    for rank in three:
        found, equal, _, notes = rank.value["partners"]["a bit of one copy"]
        assert (found, equal) == ([True, 2], True)
        assert len(notes) == 1
        assert "rank-00001.safetensors between 0 and" in notes[0]
        found, equal, told, _ = rank.value["partners"]["a bit of one copy, the other lost"]
        assert (found, equal) == (None, True)  # nothing was overwritten: the run begins as initialised
        assert "rank-00001.safetensors does not match its sha256" in told[0]
        found, equal, told, _ = rank.value["partners"]["two nodes lost"]
        assert (found, equal) == (None, True)
        assert told == ["no living node holds the files of ranks [1]"]


def test_two_copies_are_kept_and_all_memory_is_given_back(three: list[RankResult]) -> None:
    for rank in three:
        result = rank.value["housekeeping"]
        assert result["left"] == ["step-00000003-a001", "step-00000002-a001"]
        assert result["held"] > 0
        assert result["gone"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A directory that counts as a run whose state the test sets."""
    found = RunDirectory(open_store(tmp_path / "run"))
    found.store.put("run.yaml", encode_config(config()))
    return found


def _dead() -> ProcessIdentity:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = identify_process(process.pid)
    process.communicate(b"\n")
    return identity


def _folder(base: Path, run: RunDirectory, uuid: str, process: ProcessIdentity, monkeypatch) -> Path:
    monkeypatch.setattr("pretrain.rundir.memory_folders.this_process", lambda: process)
    folder = base / f"pretrain-ram-{uuid}-node"
    assert write_owner(folder, MemoryOwner(run.url, uuid)) == ""
    (folder / "step-00000001-a001").mkdir()
    (folder / "step-00000001-a001" / "file").write_bytes(b"x" * 100)
    return folder


@pytest.mark.parametrize(
    ("state", "orphan"), [("lost", False), ("failed", False), ("interrupted", False), ("completed", True)]
)
def test_memory_of_a_dead_process_stays_while_its_run_can_go_on(tmp_path, run, monkeypatch, state, orphan):
    folder = _folder(tmp_path, run, run_uuid(run.checkpoints), _dead(), monkeypatch)

    class Status:
        pass

    status = Status()
    status.state = state
    monkeypatch.setattr(RunDirectory, "status", lambda self: status)
    (seen,) = memory_folders(tmp_path)
    assert seen.bytes > 100
    assert seen.run_url == run.url
    removed = remove_orphans(tmp_path)
    assert [found.path for found in removed] == ([folder] if orphan else [])
    assert folder.exists() is not orphan
    if orphan:
        assert removed[0].orphan == f"{run.url} is completed"


def test_memory_goes_when_the_run_is_gone_or_another_one_and_never_under_a_living_process(tmp_path, run, monkeypatch):
    base = tmp_path / "base"
    base.mkdir()
    other = _folder(base, run, "ffff", _dead(), monkeypatch)
    run_uuid(run.checkpoints)
    gone = _folder(base, RunDirectory(open_store(tmp_path / "absent")), "eeee", _dead(), monkeypatch)
    living = _folder(base, run, "dddd", identify_process(os.getpid()), monkeypatch)
    elsewhere = _folder(base, run, "cccc", ProcessIdentity("other", "another boot", 1, 1.0), monkeypatch)
    reasons = {found.path: found.orphan for found in remove_orphans(base)}
    assert reasons == {other: f"{run.url} is another run now", gone: f"{tmp_path / 'absent'} is gone"}
    assert sorted(base.iterdir()) == sorted([living, elsewhere])
    assert run_uuid(run.checkpoints) == run_uuid(run.checkpoints)
