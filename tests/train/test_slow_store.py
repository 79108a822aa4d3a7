"""Two ranks that read from a failing server through one cache: the same run as from a local copy, only later."""

from __future__ import annotations

import time
from pathlib import Path

from pretrain.checkpoint import list_checkpoints, weights_sha256
from pretrain.rundir import RunDirectory
from tests.data_build.servers import files_over_http
from tests.ranks import run_ranks
from tests.tiny import build_tiny, steps_of
from tests.train.rank_programs import trainings

FAULTS = {0: "error", 2: "drop", 4: "short", 5: "stall"}  # by number of the GET, modulo 7
MANIFEST_FAULTS = ("error", "short", "drop", "")
OUTAGE_AT, OUTAGE_S = 20, 1.0


def test_a_failing_server_delays_two_ranks_and_changes_nothing(tmp_path: Path) -> None:
    tiny = build_tiny(tmp_path, documents=60)  # fewer rows than the run reads: all blocks are fetched
    met: list[str] = []
    down_until = [0.0]

    def fault(number: int, path: str) -> str:
        if number == OUTAGE_AT:
            down_until[0] = time.monotonic() + OUTAGE_S
        kind = "error" if time.monotonic() < down_until[0] else FAULTS.get(number % 7, "")
        if path.endswith("manifest.json"):
            kind = MANIFEST_FAULTS[min(sum(path in one for one in met), len(MANIFEST_FAULTS) - 1)]
        met.append(f"{kind} {path}")
        return kind

    with files_over_http(tiny.folder) as server:
        server.fault, server.stall_s = fault, 1.5
        common = ["schedule.total_steps=20", "checkpoint.every_steps=20"]
        source = f"data.sources.text.path={server.url}/text/train"
        remote = [source if "data.sources" in one else one for one in tiny.decoder(*common)]
        remote.append(f"data.cache={tmp_path / 'cache'}")
        runs = [tiny.decoder("name=local", *common), [*remote, "name=remote"], [*remote, "name=cached"]]
        asked = []
        for run in runs:
            before = len(met)
            results = run_ranks(trainings, ranks=2, arguments={"runs": [run], "home": str(tmp_path)}, timeout_s=120)
            assert [result.value for result in results] == [[0], [0]], results[0].output[-3000:]
            asked.append(met[before:])
    local, remote_steps, cached = (steps_of(tmp_path / name) for name in ("local", "remote", "cached"))
    assert list(local) == list(range(1, 21))
    for step, record in local.items():
        for field in ("loss", "gradient_norm", "data_digest", "tokens"):
            assert remote_steps[step][field] == cached[step][field] == record[field], (step, field)
    found = [RunDirectory.locate(str(tmp_path / name)) for name in ("local", "remote", "cached")]
    assert len({weights_sha256(run.checkpoints, list_checkpoints(run.checkpoints)[0].name) for run in found}) == 1
    of_local, of_remote, of_cached = asked
    assert not of_local
    assert {line.split(" ")[0] for line in of_remote} == {"", *FAULTS.values()}, "each fault came to pass"
    assert sum(record["data_retries"] for record in remote_steps.values()) > 0
    blocks = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert blocks
    assert all(path.suffix == ".block" for path in blocks), "nothing half-written is left"
    good = sum(line.startswith(" ") and line.endswith(".tar") for line in of_remote)
    assert len(blocks) <= good <= 2 * len(blocks) + of_remote.count("stall")
    assert not [line for line in of_cached if line.endswith(".tar")], "all blocks come from the cache"


def test_a_server_that_stays_silent_ends_the_run_by_name_before_any_collective_could(tmp_path: Path) -> None:
    tiny = build_tiny(tmp_path, documents=60)
    silent_since: list[float] = []

    def has_trained() -> bool:
        return any('"loss"' in path.read_text() for path in (tmp_path / "silent" / "metrics").glob("attempt-*.jsonl"))

    def fault(number: int, path: str) -> str:
        if not path.endswith(".tar") or not (silent_since or has_trained()):
            return ""
        silent_since.append(time.monotonic())
        return "stall"

    with files_over_http(tiny.folder) as server:
        server.fault, server.stall_s = fault, 60
        given = ["name=silent", "schedule.total_steps=400", "health.data_timeout_s=2", "health.collective_timeout_s=30"]
        source = f"data.sources.text.path={server.url}/text/train"
        run = [
            source if "data.sources" in one else one for one in tiny.decoder(*given, "health.heartbeat_timeout_s=40")
        ]
        results = run_ranks(trainings, ranks=2, arguments={"runs": [run], "home": str(tmp_path)}, timeout_s=90)
        assert time.monotonic() - silent_since[0] < 20
    ended = {result.value[0]: result.output for result in results}
    assert 3 in ended, results
    assert set(ended) <= {3, 6}  # who waited for no row himself is not to blame
    assert "did not come within health.data_timeout_s=2" in ended[3]
    assert f"{server.url}/text/train/0" in ended[3]
    assert 0 < len(steps_of(tmp_path / "silent")) < 400
