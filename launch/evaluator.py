"""Measures every checkpoint of a run while it trains, beside it: `pretrain evaluate RUN --follow`, or on a spare slot.

Takes a run -> a record per checkpoint in its `evaluations/`, the newest first, older ones when there is time, until
the run has ended and nothing is left to measure. It only reads what the run has published and holds each checkpoint
while it reads it (a lease, as every reader), so that it changes nothing of the training; killed at any time it loses
what it was measuring. Two at once do the same work twice, with the same result.
As a process: `python -m launch.evaluator RUN_URL`, with config.eval of the run.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from launch.evaluation import measure_losses, score_translations
from launch.runs import has_ended
from launch.trained import open_checkpoints
from pretrain.checkpoint import CheckpointInfo, list_checkpoints
from pretrain.config import RunConfig
from pretrain.errors import CheckpointError, ExitCode, PretrainError, StoreError
from pretrain.generate.beam import BeamOptions
from pretrain.generate.evaluate import LossTotals
from pretrain.generate.translations import Pair, read_pairs
from pretrain.metrics.evaluations import FOLDER, evaluation_key, write_evaluation
from pretrain.rundir import RunDirectory
from pretrain.train.watch import die_with_parent

LOOK_EVERY_S, LOOK_REMOTE_EVERY_S = 2.0, 15.0  # an object store asks a price for every look
NICENESS = 10  # a slot may share its cores with ranks


@dataclass(slots=True)
class Evaluator:
    """See the module.

    Attributes:
        average: checkpoints in the mean that is measured.
        say: tells people.
        damaged: checkpoints that could not be measured.
    """

    run: RunDirectory
    config: RunConfig
    average: int
    say: Callable[[str], None]
    damaged: set[str] = field(default_factory=set)

    def follow(self) -> None:
        """Measures until the run has ended and every good checkpoint that is there was measured. A storage that fails
        is asked again.

        Raises:
            UserError: what is to be measured cannot be read.
            CheckpointError: at the end, of checkpoints that are damaged.
        """
        failures = 0
        while True:
            try:
                is_over = self._look()
            except StoreError as error:
                failures += 1
                self.say(f"the storage failed, it is asked again: {error}")
                time.sleep(min(60.0, LOOK_EVERY_S * 2 ** min(failures, 5)))
                continue
            failures = 0
            if is_over:
                break
        if self.damaged:
            names = ", ".join(sorted(self.damaged))
            raise CheckpointError(
                f"{names} could not be measured. What was wrong stands above; see pretrain checkpoint verify."
            )

    def _look(self) -> bool:
        """Measures the newest checkpoint that was not measured, or waits a little; True when all is over."""
        ended = has_ended(self.run.status())  # before the look: the last checkpoint is published before the end
        done = set(self.run.store.list(FOLDER))
        new = [name for name in self.run.checkpoints.names() if evaluation_key(name, self.average) not in done]
        new = [name for name in new if name not in self.damaged]
        # A look at checkpoints asks for the size of every file; most looks find that there is nothing new.
        infos = [info for info in list_checkpoints(self.run.checkpoints) if info.problem is None] if new else []
        left = [info for info in infos if info.name in new]
        if not left:
            if not ended:
                is_remote = self.run.store.local_path(FOLDER) is None
                time.sleep(LOOK_REMOTE_EVERY_S if is_remote else LOOK_EVERY_S)
            return ended
        info = left[0]
        names = _mean_of(info, infos, self.average)
        try:
            self.measure(info, names)
        except CheckpointError as error:
            still = [one.name for one in list_checkpoints(self.run.checkpoints) if one.problem is None]
            if set(names) <= set(still):
                self.damaged.add(info.name)
                self.say(f"{info.name} cannot be measured: {error}")
            else:
                self.say(f"{info.name} or one of its mean was deleted before it was measured")
        return False

    def measure(self, info: CheckpointInfo, names: Sequence[str]) -> None:
        """Writes the record of one checkpoint, from the mean of `names`. Raises PretrainError."""
        start = time.monotonic()
        trained = open_checkpoints(self.run, self.config, names)
        label = f" (mean of {self.average})" if self.average > 1 else ""  # one curve, also where there are fewer yet
        values: dict[str, dict[str, float | int]] = {}
        if self.config.data.validation:
            losses = measure_losses(trained, {}, max_rows=None, say=lambda text: None)
            values |= {f"{name}{label}": totals.to_record() for name, totals in losses.items()}
            self._tell(info, label, losses)
        wanted = self.config.eval.translation
        key = evaluation_key(info.name, self.average)
        if wanted is not None:
            beams = None if wanted.num_beams == 1 else BeamOptions(wanted.num_beams, wanted.length_penalty)
            scores, samples = score_translations(
                trained, self._pairs(), beams=beams, max_tokens=wanted.max_tokens, say=lambda text: None
            )
            values[f"translation{label}"] = {"bleu": scores.bleu, "chrf": scores.chrf}
            kept = "".join(sample.to_line() for sample in samples)
            self.run.store.put(key.removesuffix(".json") + ".translations.jsonl", kept.encode())
            self.say(f"{info.name}{label}: BLEU {scores.bleu:.2f}, chrF {scores.chrf:.2f}")
        record = {
            "step": info.step, "attempt": info.attempt, "t": time.time(), "checkpoint": info.name,
            "checkpoints": list(names), "seconds": time.monotonic() - start, "validation": values,
        }  # fmt: skip
        write_evaluation(self.run.store, key, record)

    def _pairs(self) -> list[Pair]:
        wanted = self.config.eval.translation
        assert wanted is not None
        fields = {"source_field": wanted.source_field, "target_field": wanted.target_field}
        return read_pairs(wanted.pairs, **fields, limit=wanted.max_pairs)

    def _tell(self, info: CheckpointInfo, label: str, losses: dict[str, LossTotals]) -> None:
        for name, totals in losses.items():
            self.say(f"{info.name}{label}: {name} loss {totals.loss:.4f}, {totals.bits_per_byte:.4f} bits/byte")


def _mean_of(info: CheckpointInfo, infos: Sequence[CheckpointInfo], count: int) -> list[str]:
    """Names of a checkpoint and of those before it in its line, newest first: `count`, or as many as there are."""
    line = [info]
    for other in infos:  # newest attempt first: an older one counts up to where a later one went on
        if other.attempt <= line[-1].attempt and other.step < line[-1].step:
            line.append(other)
    return [one.name for one in line[:count]]


def main() -> int:
    """The process on a spare slot: it ends with its agent. Exit code as of commands."""
    if "PRETRAIN_LIFELINE_FD" in os.environ:  # of an agent
        die_with_parent()
    os.nice(NICENESS)
    run = RunDirectory.locate(sys.argv[1])
    config = run.config()
    wanted = config.eval.checkpoints
    average = 1 if wanted is None else wanted.average

    def say(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    try:
        Evaluator(run, config, average, say).follow()
    except PretrainError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return int(error.exit_code)
    return int(ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main())
