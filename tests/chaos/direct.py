"""Trials on rank processes without agents: start, hurt, start again until the run is complete, compare."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from pretrain.checkpoint import list_checkpoints
from pretrain.errors import PretrainError
from pretrain.rundir import RunDirectory
from tests.chaos.plan import GUILTY_STEP, SAVE_EVERY, STEPS, Trial
from tests.chaos.verdict import differences, leftovers
from tests.data_build.servers import s3_server
from tests.ranks_pool import Group, RankPool
from tests.tiny import Tiny
from tests.train.guilty import digests_of_steps

_STARTS = 8
_PEER_GRACE_S = 3.0


@dataclass(frozen=True, slots=True)
class Result:
    """How a trial ended; it counts only when `fired`.

    Attributes:
        problems: empty when the run ended as the untouched one, in time and with nothing left.
    """

    trial: Trial
    fired: bool
    problems: tuple[str, ...]
    starts: int
    seconds: float


class DirectBench:
    """Runs trials one after the other in `folder`, each compared with an untouched run of as many ranks."""

    def __init__(self, folder: Path, tiny: Tiny, pool: RankPool) -> None:
        self._folder, self._tiny, self._pool = folder, tiny, pool
        self._references: dict[str, RunDirectory] = {}
        self._servers = contextlib.ExitStack()
        self._bucket: str | None = None

    def close(self) -> None:
        """Ends the S3 server, if there is one."""
        self._servers.close()

    def run(self, trial: Trial) -> Result:
        overrides = trial.overrides if trial.guilty else ()
        reference = self.reference(trial.ranks, guilty=trial.guilty, experts=trial.experts, overrides=overrides)
        home = self._folder / f"trial-{trial.number:04d}"
        home.mkdir(parents=True)
        plan = home / "faults.json"
        plan.write_text(json.dumps(trial.orders))
        began = time.monotonic()
        starts, problems = 0, []
        while True:
            starts += 1
            group = self._start(home, trial, plan)
            if not self._see_end(group, trial):
                problems.append(f"start {starts} did not end in {trial.bound_s:g} s\n{group.output()}")
                break
            if all(code == 0 for code in group.codes.values()) and len(group.codes) == trial.ranks:
                break
            if starts == _STARTS:
                problems.append(f"not complete after {starts} starts, codes {group.codes}\n{group.output()}")
                break
            if 2 in group.codes.values():
                problems.append(f"a fault was taken for a user error\n{group.output()}")
                break
            if starts == 1 and trial.act:
                damage(home / "run" / "checkpoints", trial.act)
        seconds = time.monotonic() - began
        fired = all(Path(f"{plan}.fired-{index}").exists() for index in range(len(trial.orders)))
        if not problems:
            run = RunDirectory.locate(f"{self._home_url(home, trial)}/run")
            problems += differences(reference, run, STEPS, records=not trial.on_s3)
            problems += leftovers(run, str(home), home / "memory")
        if seconds > trial.bound_s:
            problems.append(f"took {seconds:.0f} s, at most {trial.bound_s:g}")
        return Result(trial, fired, tuple(problems), starts, seconds)

    def reference(
        self, ranks: int, *, guilty: bool = False, experts: bool = False, overrides: tuple[str, ...] = ()
    ) -> RunDirectory:
        """A run of as many ranks that nobody hurts; a guilty one meets its rows as well."""
        name = f"untouched-{ranks}{'-guilty' if guilty else ''}{'-experts' if experts else ''}"
        if name not in self._references:
            home = self._folder / name
            home.mkdir(parents=True)
            trial = Trial(0, "untouched", ranks, False, (), overrides=overrides, guilty=guilty, experts=experts)
            group = self._start(home, trial, home / "no-faults")
            assert group.wait(60.0), group.output()
            assert set(group.codes.values()) == {0}, group.output()
            self._references[name] = RunDirectory.locate(str(home / "run"))
            went_back = sum(event.kind == "rolled_back" for event in self._references[name].events())
            assert went_back == guilty, group.output()
        return self._references[name]

    def _start(self, home: Path, trial: Trial, plan: Path) -> Group:
        memory = home / "memory"
        overrides = [
            "name=run", f"schedule.total_steps={STEPS}", f"checkpoint.every_steps={SAVE_EVERY}",
            f"cluster.num_ranks={trial.ranks}", *trial.overrides,
        ]  # fmt: skip
        if trial.memory:
            memory.mkdir(exist_ok=True)
            overrides += ["checkpoint.ram_every_steps=1", f"checkpoint.ram_directory={memory}"]
        environment = {
            "PRETRAIN_HOME": self._home_url(home, trial), "PRETRAIN_FAULTS": str(plan), "PRETRAIN_TRIAL": str(home),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        environment |= {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        logs = [home / f"rank-{rank}.log" for rank in range(trial.ranks)]
        words = self._tiny.moe(*overrides) if trial.experts else self._tiny.decoder(*overrides)
        arguments = [*words, "--resume", "auto"]
        prelude = ""
        if trial.guilty:
            spoilt = digests_of_steps(self._tiny.decoder("name=any"), range(GUILTY_STEP, GUILTY_STEP + 1))
            environment["GUILTY"] = json.dumps({spoilt[GUILTY_STEP][1]: "1000"})
            prelude = "tests.train.guilty:install"
        return self._pool.start(arguments, ranks=trial.ranks, environment=environment, logs=logs, prelude=prelude)

    def _home_url(self, home: Path, trial: Trial) -> str:
        if not trial.on_s3:
            return str(home)
        if self._bucket is None:
            self._bucket = self._servers.enter_context(
                s3_server("moto", self._folder / "s3", self._servers.enter_context(pytest.MonkeyPatch.context()))
            )
        return f"{self._bucket}/{home.name}"

    def _see_end(self, group: Group, trial: Trial) -> bool:
        """Whether a rank ended by itself; what is left of the others a moment later is killed, as torchrun would."""
        ended = group.wait_for_one(trial.bound_s)
        if ended and all(code == 0 for code in group.codes.values()):
            group.wait(30.0)
        elif ended:
            group.wait(_PEER_GRACE_S)
        group.kill()
        return ended


def damage(checkpoints: Path, act: str) -> None:
    """Flips a bit in, cuts or removes a file of the newest good checkpoint. Raises when there are not two good ones."""
    what, name = act.split(" ")
    good = [info for info in list_checkpoints(RunDirectory.locate(str(checkpoints.parent)).checkpoints)
            if not info.problem]  # fmt: skip
    if len(good) < 2:
        raise PretrainError(f"{checkpoints} has {len(good)} good checkpoints. Damage needs one to fall back to.")
    path = checkpoints / good[0].name / name
    if what == "lose":
        path.unlink()
    elif what == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
