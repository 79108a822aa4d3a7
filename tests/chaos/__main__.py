"""`python -m tests.chaos [--trials 200] [--cluster 40] [--seed 0] [--only WORD]`: the whole campaign by one command.

Prints a line per trial and a JSON summary; exit code 1 when a run was not equal or a fault did not fire.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.chaos.cluster import ClusterBench, cluster_trials
from tests.chaos.direct import DirectBench, Result
from tests.chaos.head import head_trials, run_head_trial
from tests.chaos.plan import direct_trials
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
    args = parser.parse_args()
    began = time.monotonic()
    results: list[Result] = []

    def note(result: Result) -> None:
        results.append(result)
        word = "not fired" if not result.fired else "EQUAL" if not result.problems else "DIFFERS"
        print(f"{result.trial.number:4d} {word:9s} {result.seconds:5.1f} s {result.starts} starts  "
              f"{result.trial.name} ranks={result.trial.ranks} memory={result.trial.memory}", flush=True)  # fmt: skip
        for problem in result.problems:
            print("     " + problem.replace("\n", "\n     "), flush=True)

    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        tiny = build_tiny(folder / "data") if not (folder / "data").mkdir() else None
        assert tiny is not None
        with RankPool() as pool:
            bench = DirectBench(folder, tiny, pool)
            for trial in direct_trials(args.trials - args.cluster, args.seed):
                if args.only in trial.name and time.monotonic() - began < args.limit_s:
                    note(bench.run(trial))
            reference = bench.reference(2)
            bench.close()
        through_ray = [trial for trial in cluster_trials(args.cluster, args.seed) if args.only in trial.name]
        if through_ray:
            with ClusterBench(folder, tiny, reference) as cluster:
                for trial in through_ray:
                    if time.monotonic() - began < args.limit_s:
                        note(cluster.run(trial))
        for trial in head_trials(args.heads, args.seed):
            if args.only in trial.name and time.monotonic() - began < args.limit_s:
                note(run_head_trial(folder, tiny, reference, trial))
    summary = summarise(results, time.monotonic() - began)
    print(json.dumps(summary), flush=True)
    return int(summary["equal"] != summary["trials"])


def summarise(results: list[Result], seconds: float) -> dict[str, Any]:
    fired = [result for result in results if result.fired]
    points = collections.Counter(tag for result in fired for tag in result.trial.tags)
    return {
        "tried": len(results), "trials": len(fired), "equal": sum(not result.problems for result in fired),
        "seconds": round(seconds, 1), "points": dict(sorted(points.items())),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
