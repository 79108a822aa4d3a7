"""`python -m tests.chaos [--trials 200] [--cluster 40] [--seed 0] [--only WORD]`: the whole campaign by one command.

Prints a line per trial and a JSON summary; exit code 1 when a run was not equal or a fault did not fire. With
`--results FILE` an interrupted campaign goes on behind the good trials that the file holds.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.chaos.cluster import ClusterBench, cluster_trials
from tests.chaos.direct import DirectBench, Result
from tests.chaos.head import head_trials, run_head_trial
from tests.chaos.plan import Trial, direct_trials
from tests.ranks_pool import RankPool
from tests.tiny import build_tiny


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Hurts runs and compares them.")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--cluster", type=int, default=40, help="how many of them go through agents and Ray")
    parser.add_argument("--heads", type=int, default=0, help="further ones that kill the head of a run's own Ray")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="trials whose name holds this word")
    parser.add_argument("--limit-s", type=float, default=5400.0, help="begin no trial later than this")
    parser.add_argument("--results", type=Path, help="keep what became of each trial in this file, and go on from it")
    args = parser.parse_args()
    began = time.monotonic()
    kept = Kept(args.results, args.seed)
    results: list[Outcome] = list(kept.outcomes.values())

    def due(trial: Trial) -> bool:
        in_time = time.monotonic() - began < args.limit_s
        return args.only in trial.name and in_time and trial.number not in kept.outcomes

    def note(result: Result) -> None:
        results.append(kept.add(result))
        word = "not fired" if not result.fired else "EQUAL" if not result.problems else "DIFFERS"
        print(f"{result.trial.number:4d} {word:9s} {result.seconds:5.1f} s {result.starts} starts  "
              f"{result.trial.name} ranks={result.trial.ranks} memory={result.trial.memory}", flush=True)  # fmt: skip
        for problem in result.problems:
            print("     " + problem.replace("\n", "\n     "), flush=True)

    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        (folder / "data").mkdir()
        tiny = build_tiny(folder / "data")
        with RankPool() as pool:
            bench = DirectBench(folder, tiny, pool)
            for trial in filter(due, direct_trials(args.trials - args.cluster, args.seed)):
                note(bench.run(trial))
            references = {ranks: bench.reference(ranks) for ranks in (1, 2)}
            bench.close()
        through_ray = [trial for trial in cluster_trials(args.cluster, args.seed) if due(trial)]
        if through_ray:
            with ClusterBench(folder, tiny, references) as cluster:
                for trial in filter(due, through_ray):
                    note(cluster.run(trial))
        for trial in filter(due, head_trials(args.heads, args.seed)):
            note(run_head_trial(folder, tiny, references[2], trial))
    summary = summarise(results, time.monotonic() - began)
    print(json.dumps(summary), flush=True)
    return int(not summary["equal"] == summary["trials"] == summary["tried"])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the summary needs of a trial."""

    number: int
    tags: tuple[str, ...]
    fired: bool
    equal: bool
    seconds: float


class Kept:
    """What became of the trials of a seed, one JSON line each; good ones are not tried again.

    Attributes:
        outcomes: of good trials, by number.
    """

    def __init__(self, path: Path | None, seed: int) -> None:
        self._path, self._seed = path, seed
        self.outcomes: dict[int, Outcome] = {}
        for line in path.read_text().splitlines() if path is not None and path.exists() else ():
            entry = json.loads(line)
            if entry.pop("seed") == seed and entry["fired"] and entry["equal"]:
                self.outcomes[entry["number"]] = Outcome(**{**entry, "tags": tuple(entry["tags"])})

    def add(self, result: Result) -> Outcome:
        trial = result.trial
        outcome = Outcome(
            trial.number, tuple(sorted(trial.counted)), result.fired, not result.problems, round(result.seconds, 1)
        )
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"seed": self._seed, **asdict(outcome)}) + "\n")
        return outcome


def summarise(results: list[Outcome], seconds: float) -> dict[str, Any]:
    fired = [result for result in results if result.fired]
    points = collections.Counter(tag for result in fired for tag in result.tags)
    return {
        "tried": len(results), "trials": len(fired), "equal": sum(result.equal for result in fired),
        "seconds": round(seconds, 1), "seconds_of_trials": round(sum(result.seconds for result in results), 1),
        "points": dict(sorted(points.items())),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
