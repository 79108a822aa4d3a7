"""`pretrain watch` on a real tiny run that was killed, ended, changed and resumed: every page of the app against the
run's files, read here once more without any of its readers.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.monitor.reader import RunReader
from launch.monitor.watch_app import WatchApp
from pretrain.faults import VARIABLE
from pretrain.rundir import RunDirectory
from tests.ranks_pool import RankPool
from tests.tiny import build_tiny

SAVE_EVERY, KILL, FIRST_END = 4, 7, 10


@pytest.fixture
def run(tmp_path: Path, rank_pool: RankPool) -> Iterator[RunDirectory]:
    """Killed at step 7, went on from 4 to its end at 10; resumed with more steps and another rate, and running."""
    words = build_tiny(tmp_path, documents=60).decoder("name=seen", f"checkpoint.every_steps={SAVE_EVERY}")
    plan, home, logs = tmp_path / "faults.json", tmp_path / "runs", tmp_path / "runs" / "seen" / "logs"
    plan.write_text(json.dumps([{"point": "step.begins", "do": "kill", "nth": KILL}]))
    short, changed = (
        [f"schedule.total_steps={FIRST_END}"],
        ["schedule.total_steps=100000", "optimizer.learning_rate=0.02"],
    )
    environment = {"PRETRAIN_HOME": str(home), VARIABLE: str(plan)}
    for attempt, more in enumerate([short, short, changed], start=1):
        log = tmp_path / f"{attempt}.log"
        group = rank_pool.start([*words, *more, "--resume", "auto"], ranks=1, environment=environment, logs=[log])
        deadline = time.monotonic() + 60
        while not (group.codes if attempt < 3 else len(_records(home / "seen", 3)) >= 3):
            assert time.monotonic() < deadline, group.output()
            time.sleep(0.05)
        assert group.codes == ({0: -signal.SIGKILL}, {0: 0}, {})[attempt - 1], group.output()
        (logs / f"attempt-{attempt:03d}").mkdir(parents=True)
        (logs / f"attempt-{attempt:03d}" / "rank-00000.log").hardlink_to(log)  # as an agent has it
    try:
        yield RunDirectory.locate(str(home / "seen"))
    finally:
        group.kill()


def _records(run: Path, attempt: int) -> list[dict[str, Any]]:
    path = run / "metrics" / f"attempt-{attempt:03d}.jsonl"
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if "loss" in record]


def _events(run: Path, kind: str) -> list[dict[str, Any]]:
    bodies = [json.loads(path.read_bytes())["body"] for path in sorted((run / "journal").glob("*/*.json"))]
    return [{"t": body["t"], **body["fields"]} for body in bodies if body["kind"] == kind]


def _time(t: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(t))


async def _looked_at(run: RunDirectory) -> dict[str, list[str]]:
    """The lines of each page; pages and logs are turned by keys, and what is on the screen is what is told."""
    app = WatchApp(RunReader(run), 0.2)
    pages: dict[str, list[str]] = {}
    async with app.run_test(size=(120, 60)) as pilot:
        for key, name in enumerate(("run", "history", "config", "logs"), start=1):
            await pilot.press(str(key))
            for _ in range(200):
                await pilot.pause(0.05)
                if app.shown:
                    break
            await pilot.pause(0.3)
            picture = re.sub(r"&#160;|\s+", " ", app.export_screenshot())
            assert app.shown[name][0].lines[0].split()[0] in picture
            pages[name] = [line for panel in app.shown[name] for line in [panel.title, *panel.lines]]
            if os.environ.get("SCREENSHOTS"):
                Path(os.environ["SCREENSHOTS"], f"watch-{name}.svg").write_text(app.export_screenshot())
        await pilot.press("p")
        for _ in range(100):
            await pilot.pause(0.05)
            if app.shown["logs"][0].title != pages["logs"][0]:
                break
        pages["log before"] = [app.shown["logs"][0].title, *app.shown["logs"][0].lines]
        await pilot.press("q")
    return pages


def test_every_page_of_the_app_says_what_the_files_of_a_real_run_say(run: RunDirectory) -> None:
    path = Path(run.url)
    before = len(_records(path, 3))
    pages = asyncio.run(_looked_at(run))
    after = len(_records(path, 3))
    first, second, third = (_records(path, attempt) for attempt in (1, 2, 3))
    assert (first[-1]["step"], second[0]["step"], third[0]["step"]) == (KILL - 1, SAVE_EVERY + 1, FIRST_END + 1)

    text = "\n".join(pages["run"])
    losses = {f"{record['loss']:.4f}" for record in third[before - 1 : after]}
    assert re.findall(r"^loss +(\S+)", text, re.MULTILINE)[0] in losses
    shown_step = int(re.findall(r"^step +(\d+)/100000", text, re.MULTILINE)[0])
    assert third[before - 1]["step"] <= shown_step <= third[after - 1]["step"]
    assert f"rate       {third[0]['learning_rate']:.3g}"[:14] in text
    saved = sorted(each.name for each in (path / "checkpoints").iterdir() if (each / "MANIFEST.json").exists())
    sizes = {name: sum(file.stat().st_size for file in (path / "checkpoints" / name).glob("rank-*")) for name in saved}
    for name in saved:
        row = next((line for line in pages["run"] if line.startswith(name)), None)
        if row is not None:  # the newest ones; what was saved after the look is not there
            assert f"{sizes[name] / 1e3:.0f}kB" in row
            assert re.search("sizes match|read by attempt", row)

    history = pages["history"]
    starts, commits = _events(path, "attempt_started"), _events(path, "committed")
    at = history.index("timeline")
    marks, bar, below, ends = history[at + 1 : at + 5]
    begin, end = _events(path, "created")[0]["t"], _last_moment(history[at + 4])
    assert re.sub(" +", "", marks) == "123"
    assert ends.startswith(_time(begin))
    assert bar.endswith("█")
    for mark, t in (("2", starts[1]["t"]), ("3", starts[2]["t"])):
        place = [len(bar) * (t - begin) / (last - begin) for last in (end + 1, end)]  # it ends within that second
        assert place[0] - 1 <= marks.index(mark) <= place[1] + 1, (mark, marks)
    assert 1 <= below.count("▴") <= len(commits)
    (row,) = (line.split() for line in history if re.match(r"1 +1 +\S+ +0 ", line))
    assert row[4:6] == [str(KILL - 1), str(SAVE_EVERY)]
    assert row[-1] == "lost"
    told = [line for line in history if re.match(r"\d\d:\d\d:\d\d ", line)]
    for event in commits[:2]:
        assert f"{_time(event['t'])} saved {event['checkpoint']}" in told

    for page in ("history", "config"):
        changed = re.sub(r"\s+", " ", " ".join(pages[page]))
        for field in (f"schedule.total_steps: {FIRST_END} -> 100000", "optimizer.learning_rate: 0.01 -> 0.02"):
            assert f"attempt 3, {_time(starts[2]['t'])}: {field}" in changed, (page, field)
    fields = dict(line.split(maxsplit=1) for line in pages["config"] if re.match(r"[\w.]+ +\S+$", line))
    assert fields["schedule.total_steps"] == "100000"
    assert fields["optimizer.learning_rate"] == "0.02"
    assert fields["name"] == "seen"

    for page, attempt in (("logs", 3), ("log before", 2)):
        log = (path / "logs" / f"attempt-{attempt:03d}" / "rank-00000.log").read_text()
        assert pages[page][0] == f"attempt-{attempt:03d}/rank-00000.log ({attempt} of 3)"
        joined = "".join(pages[page][1:])
        assert joined in log.replace("\n", "").expandtabs()
        assert log.splitlines()[0].expandtabs() in joined


def _last_moment(ends: str) -> float:
    """The moment at the right end of the timeline, of today."""
    word = ends.split()[-1]
    today = time.strftime("%Y-%m-%d", time.localtime())
    return time.mktime(time.strptime(f"{today} {word}", "%Y-%m-%d %H:%M:%S"))
