"""`pretrain prove`: the same config untouched, and killed again and again, must give the same bits.

Takes a config → two runs in a directory of their own → a comparison of every step, the final state and the final
weights, and a picture of it. The kills are real SIGKILLs: of a rank, of all ranks or of an agent (the controller
restarts the attempt), or of the whole `pretrain train` process (`pretrain resume` goes on). A kill without
evidence that it fired is an error, never a proof.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from launch.proof import Comparison, PlannedKill, compare_records, plan_kills
from launch.tables import format_table
from launch.trial import TrialRun
from pretrain.config import RunConfig, load_config
from pretrain.errors import UserError
from pretrain.metrics.history import history, read_attempts
from pretrain.rundir import RunDirectory
from pretrain.rundir.directory import home_url
from pretrain.store import Store, open_store


@dataclass(frozen=True, slots=True)
class ProveOptions:
    """What to prove.

    Attributes:
        config: path of the YAML file.
        overrides: `key=value` for both runs.
        kills: SIGKILLs of the second run.
        seed: of the moments and targets of the kills.
        keep: leave the two runs where they are.
    """

    config: str
    overrides: Sequence[str] = ()
    kills: int = 3
    seed: int = 0
    keep: bool = False


@dataclass(frozen=True, slots=True)
class FiredKill:
    """A kill that provably fired.

    Attributes:
        step: steps done when it fired.
        evidence: what says that the process died of it.
        back_s: seconds until a later attempt had recorded a step.
    """

    target: str
    pid: int
    attempt: int
    step: int
    evidence: str
    back_s: float | None = None


@dataclass(slots=True)
class Proof:
    """The result; `equal` is the verdict.

    Attributes:
        directory: where the two runs are, if they were kept.
        plot: the picture of both runs.
        rows_jumped_over: of the data stream, where the run found them guilty of a spike (the same in both).
    """

    name: str
    steps: int
    ranks: int
    seed: int
    kills: list[FiredKill] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    directory: str | None = None
    plot: str | None = None
    rows_jumped_over: list[tuple[int, int]] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return bool(self.comparisons) and all(comparison.equal for comparison in self.comparisons)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "equal": self.equal}

    def to_text(self) -> str:
        kills = format_table(
            ("killed", "pid", "attempt", "after step", "evidence", "next step after"),
            [(k.target, k.pid, k.attempt, k.step, k.evidence, k.back_s and f"{k.back_s:.1f} s") for k in self.kills],
        )
        rows = [(c.what, c.untouched[:22], c.killed[:22], "yes" if c.equal else "NO") for c in self.comparisons]
        verdict = (
            f"EQUAL, bit for bit: {self.steps} steps on {self.ranks} ranks, {len(self.kills)} kills (seed {self.seed})"
            if self.equal
            else f"NOT EQUAL: the killed run differs from the untouched one (seed {self.seed})"
        )
        where = [f"both runs: {self.directory}"] if self.directory else []
        where = [f"picture: {self.plot}", *where] if self.plot else where
        if self.rows_jumped_over:
            jumped = ", ".join(f"{first} to {end - 1}" for first, end in self.rows_jumped_over)
            where = [f"both runs jumped over rows {jumped}", *where]
        compared = format_table(("compared", "untouched", "killed", "equal"), rows)
        return "\n".join([kills, "", compared, "", verdict, *where])


def prove(options: ProveOptions, say: Callable[[str], None] = lambda text: None) -> Proof:
    """Trains the config twice, once with kills, and compares.

    Args:
        say: takes lines about what is going on.

    Raises:
        UserError: the config is wrong or too short for so many kills, or runs lie in an object store.
        PretrainError: one of the runs failed, or a kill did not fire.
    """
    config = load_config(options.config, options.overrides)
    steps, ranks = config.schedule.total_steps, config.cluster.num_ranks
    kills = plan_kills(options.kills, total_steps=steps, num_ranks=ranks, seed=options.seed)
    home = open_store(home_url()).child(f"prove-{config.name}-{uuid.uuid4().hex[:8]}")
    proof = Proof(config.name, steps, ranks, options.seed)
    try:
        runs = _train_both(options, config, home, kills, proof.kills, say)
        proof.comparisons, proof.rows_jumped_over = _compare(*runs, steps)
        proof.plot = str(_plot(*runs, proof, home))
    finally:
        if options.keep:
            proof.directory = home.url
            say(f"kept: {home.url}")
        else:
            home.delete_tree("")
    return proof


def _train_both(
    options: ProveOptions,
    config: RunConfig,
    home: Store,
    kills: Sequence[PlannedKill],
    fired: list[FiredKill],
    say: Callable[[str], None],
) -> tuple[RunDirectory, RunDirectory]:
    folder = home.local_path("")
    if folder is None:
        raise UserError(
            f"PRETRAIN_HOME={home_url()} is not on this machine. prove starts and kills processes here. "
            "Set PRETRAIN_HOME to a local directory."
        )
    # Every step must be recorded to be compared, and no budget may end what was killed on purpose.
    overrides = [
        *options.overrides,
        "metrics.log_every_steps=1",
        "metrics.wandb.mode=off",
        f"cluster.max_application_failures={config.cluster.max_application_failures + len(kills)}",
    ]
    stall_s = config.health.start_timeout_s + config.health.heartbeat_timeout_s
    untouched, killed = (TrialRun(Path(folder), name, stall_s=stall_s) for name in ("untouched", "killed"))
    with contextlib.closing(untouched), contextlib.closing(killed):
        say(f"1 of 2: {config.name} untouched, {config.schedule.total_steps} steps on {config.cluster.num_ranks} ranks")
        untouched.train(options.config, overrides)
        untouched.await_end()
        step_s = _step_seconds(untouched.directory)
        say(f"2 of 2: the same, killed {len(kills)} times ({step_s:.2f} s a step)")
        killed.train(options.config, overrides)
        for kill in kills:
            _fire(killed, kill, step_s, fired)
            last = fired[-1]
            say(f"killed {last.target} (pid {last.pid}) after step {last.step} of attempt {last.attempt}")
        killed.await_end()
    return untouched.directory, killed.directory


def _fire(run: TrialRun, kill: PlannedKill, step_s: float, fired: list[FiredKill]) -> None:
    """Waits for the moment, kills, and waits until a later attempt has done a step."""
    dead_attempt = fired[-1].attempt if fired else 0
    attempt, step = run.await_step(kill.step, after_attempt=dead_attempt)
    time.sleep(kill.step_fraction * step_s)
    start = time.monotonic()
    if kill.rank is None:
        pid, evidence = run.pid, run.kill_train()
        run.resume()
    elif kill.kind == "ranks":
        pid, evidence = run.kill_ranks(attempt)
    elif kill.kind == "agent":
        pid, evidence = run.kill_agent(attempt, kill.rank)
    else:
        pid, evidence = run.kill_rank(attempt, kill.rank)
    fired.append(FiredKill(kill.target, pid, attempt, step, evidence))
    run.await_step(1, after_attempt=attempt)
    fired[-1] = replace(fired[-1], back_s=time.monotonic() - start)


def _step_seconds(run: RunDirectory) -> float:
    """Median time from one step's record to the next, saving included."""
    times = [record["t"] for record in history(read_attempts(run.store)) if "validation" not in record]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


def _compare(
    untouched: RunDirectory, killed: RunDirectory, total_steps: int
) -> tuple[list[Comparison], list[tuple[int, int]]]:
    """What was compared, and the rows that both runs jumped over."""
    from pretrain.checkpoint import newest_checkpoint, read_state, weights_sha256

    comparisons = compare_records(read_attempts(untouched.store), read_attempts(killed.store), total_steps)
    names = [newest_checkpoint(run.checkpoints) for run in (untouched, killed)]
    states = [read_state(run.checkpoints, name) for run, name in zip((untouched, killed), names, strict=True)]
    ours, theirs = (f"row {state['data']['next_row']}, {state['tokens']} tokens" for state in states)
    comparisons.append(Comparison("final state", ours, theirs, states[0] == states[1]))
    one, other = (weights_sha256(run.checkpoints, name) for run, name in zip((untouched, killed), names, strict=True))
    at_the_end = all(name.startswith(f"step-{total_steps:08d}-") for name in names)
    comparisons.append(Comparison("final weights, sha256", one, other, one == other and at_the_end))
    return comparisons, [(skip["first_row"], skip["end_row"]) for skip in states[1]["data"]["skips"]]


def _plot(untouched: RunDirectory, killed: RunDirectory, proof: Proof, home: Store) -> Path:
    """Draws the comparison beside the runs' own directory, which goes."""
    from pretrain.metrics.plot_pair import plot_pair

    folder = home.local_path("")
    assert folder is not None
    path = folder.parent / "proofs" / f"{folder.name}.png"
    marks = [(kill.step, kill.target) for kill in proof.kills]
    verdict = "equal, bit for bit" if proof.equal else "NOT EQUAL"
    title = f"{proof.name}: {verdict}, {len(marks)} kills (seed {proof.seed})"
    return plot_pair(read_attempts(untouched.store), read_attempts(killed.store), marks, title, path)
