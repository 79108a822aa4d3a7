"""From a config to the objects of a run, in the order in which data flows through them.

takes → config, run directory, place among the ranks; gives → a `Training`, which the loop drives.
Everything that can fail without the other ranks is done before the first collective.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pretrain.checkpoint.interval import FailureRate, count_failures
from pretrain.config import RunConfig
from pretrain.config.capacity import model_batch
from pretrain.data.loader import Loader, open_loader
from pretrain.data.raw_loader import RawLoader
from pretrain.data.segments import steps_by_segment
from pretrain.data.state import Segment
from pretrain.data.tokenizer import Tokenizer
from pretrain.data.validation import ValidationSet, open_validation
from pretrain.engine.distributed import all_reduce_sums, vote
from pretrain.engine.engine import Engine
from pretrain.engine.zero import sharing_ranks
from pretrain.errors import PretrainError, StoreError, UserError
from pretrain.generate.translations import Pair
from pretrain.log import Log
from pretrain.metrics.peak import peak_flops_per_rank, remembered_peak
from pretrain.metrics.sinks import Sink, open_sinks
from pretrain.metrics.throughput import Throughput
from pretrain.model.attention import explain_attention
from pretrain.model.flops import hardware_flops_per_step, parameter_counts, training_flops_per_step
from pretrain.model.kernels import keep_compiled
from pretrain.model.registry import build_model
from pretrain.processor import computes_bf16
from pretrain.rundir import RunDirectory
from pretrain.topology import World
from pretrain.train.layer_watch import LayerWatch
from pretrain.train.memory import MemorySaver, open_memory_tier
from pretrain.train.own_work import OwnWork
from pretrain.train.profiler import StepProfiler
from pretrain.train.reporter import Reporter
from pretrain.train.samples import Samples, write_samples
from pretrain.train.saving import Saver
from pretrain.train.state import TrainingState
from pretrain.train.step_times import StepTimes
from pretrain.train.step_watch import StepWatch
from pretrain.train.stop import StopFlag
from pretrain.train.translate import held_out_pairs, translate_held_out
from pretrain.train.validate import validate
from pretrain.train.watch import Heartbeat

TOKENIZER_FILE = "tokenizer.json"
COMPILED = "compiled"


@dataclass(frozen=True, slots=True)
class Place:
    """Where and as what this process trains.

    Attributes:
        guard: raises FencedError when this attempt may not publish any more.
    """

    run: RunDirectory
    world: World
    device: torch.device
    attempt: int
    guard: Callable[[], None]
    reporter: Reporter
    heartbeat: Heartbeat
    stop: StopFlag
    log: Log


@dataclass(slots=True)
class Training:
    """Everything that the loop drives, for one rank of one attempt."""

    config: RunConfig
    place: Place
    loader: Loader | RawLoader
    validation: dict[str, ValidationSet]
    engine: Engine
    tokenizer: Tokenizer
    pairs: list[Pair]
    saver: Saver
    sinks: list[Sink]
    throughput: Throughput
    own_work: OwnWork
    times: StepTimes
    profiler: StepProfiler
    save_stall_s: float = field(default=0.0)
    _flops: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    rollback_s: float = field(default=0.0)
    warned: set[str] = field(default_factory=set)
    shape: tuple[int, int, int | None] | None = None  # of the micro-batches that were computed last

    def restore(self) -> TrainingState:
        """The state to go on from: the newest good checkpoint's, or the start of the run. A collective."""
        state = self.saver.restore()
        if state is None:
            return TrainingState(step=0, data=self.loader.initial_state())
        return replace(state, data=self.loader.resume(state.data))

    def restore_earlier(self, step: int) -> TrainingState | None:
        """The state of the newest good checkpoint of at most `step`; later ones are deleted. None: there is none.
        A collective."""
        state = self.saver.restore_earlier(step)
        return state and replace(state, data=self.loader.resume(state.data))

    def start_clock(self) -> None:
        """Begins to measure speed; the start of the process does not count."""
        configured, device = self.config.metrics.peak_flops_per_rank, self.place.device
        precision = self.config.engine.precision
        peak = remembered_peak(self.place.run.store, device, lambda: peak_flops_per_rank(configured, device, precision))
        self.throughput = Throughput(
            flops_per_step=training_flops_per_step(self.config.model, model_batch(self.config)),
            peak_flops=peak,
            ranks=self.place.world.size,
            total_steps=self.config.schedule.total_steps,
        )
        if self.place.world.is_main:
            known = (
                "none is known: metrics.peak_flops_per_rank sets it" if peak is None else f"{peak / 1e12:.4g} TFLOP/s"
            )
            self.place.log.info("mfu and hfu are of this peak of one rank", peak=known)

    def log_due(self, step: int) -> bool:
        """Whether the step that makes `step` steps is logged whatever comes of it."""
        return step == self.config.schedule.total_steps or step % self.config.metrics.log_every_steps == 0

    def watch(self, state: TrainingState) -> StepWatch | None:
        """Looks closer at the step that begins at `state`, if it will be logged; the same on every rank."""
        if not self.log_due(state.step + 1):
            return None
        every = self.config.metrics.layers_every_steps
        due = every is not None and (state.step + 1) % every == 0
        layers = LayerWatch(self.engine, attention=self.place.world.is_main) if due else None
        return StepWatch(self.config, self.loader, state.data, layers)

    def warn(self, step: int, words: list[str]) -> None:
        """Says what is wrong with attention heads, each once per attempt."""
        about = {re.split(r":| gives", word)[0]: word for word in words}
        new = [word for key, word in about.items() if key not in self.warned]
        self.warned |= about.keys()
        if new:
            self.place.log.warning("attention heads have gone wrong", step=step, heads=new[:8], more=len(new[8:]))

    def flops_of(self, segment: Segment) -> tuple[int, int]:
        """Model FLOPs of a step of this segment, all ranks together, and those with what is computed again."""
        shape = segment.global_batch_size, segment.sequence_length
        if shape not in self._flops:
            named = {"global_batch_size": shape[0], "sequence_length": shape[1]}
            batch = model_batch(self.config, self.config.batch.model_copy(update=named))
            recomputed, model = self.config.engine.activation_checkpointing, self.config.model
            hardware = hardware_flops_per_step(model, batch, recomputed=recomputed)
            self._flops[shape] = training_flops_per_step(model, batch), hardware
        return self._flops[shape]

    def flops_left(self, state: TrainingState) -> int:
        """Model FLOPs of the steps to come."""
        left = steps_by_segment(state.data, state.step, self.config.schedule.total_steps)
        return sum(steps * self.flops_of(segment)[0] for segment, steps in left)

    def write_record(self, record: dict[str, Any]) -> None:
        """Hands a record to every sink; only rank 0 has any."""
        record = {
            **record,
            "save_stall_s": self.save_stall_s,
            "rollback_s": self.rollback_s,
            "memory_copy_step": self.saver.memory_copy_step,
            **self.loader.fetch_record(),
        }
        self.save_stall_s = self.rollback_s = 0.0
        if self.sinks:
            self.place.heartbeat.go_on("record")  # the disk may be slow
        for sink in self.sinks:
            sink.write(record)

    @contextlib.contextmanager
    def going_back(self) -> Iterator[None]:
        """The time of a restore within an attempt, which is no step's."""
        started = time.perf_counter()
        with self.throughput.excluded():
            yield
        self.rollback_s += time.perf_counter() - started

    def measures_due(self, step: int, *, last: bool) -> tuple[str, ...]:
        """What is done after this step: losses of held-out rows, translations of held-out pairs, samples."""
        wanted = self.config.eval
        every = {
            "losses": wanted.every_steps,
            "translation": wanted.translation and wanted.translation.every_steps,
            "samples": wanted.samples and wanted.samples.every_steps,
        }
        return tuple(name for name, steps in every.items() if steps and (last or step % steps == 0))

    def measure(self, state: TrainingState, measures: tuple[str, ...]) -> None:
        """Measures on held-out data and records it; the training state stays as it is. A collective.

        A run that is asked to end meanwhile does not wait for it: what is not finished is not recorded.
        """
        if "losses" in measures:
            started = time.perf_counter()
            alive = functools.partial(self.place.heartbeat.phase, "eval", state.step)
            beat = functools.partial(alive, collective=True)
            totals = validate(self.engine, self.validation, self.place.device, beat, alive, self._asked_to_end)
            if totals is None:
                return
            losses = {name: part.to_record() for name, part in totals.items()}
            self.saver.note_validation(state.step, losses)
            self._record_validation(state, losses, started)
        if "translation" in measures:
            started = time.perf_counter()
            alive = functools.partial(self.place.heartbeat.phase, "translate", state.step)
            beat = functools.partial(alive, collective=True)
            world = self.place.world
            translated = translate_held_out(
                self.engine, self.config, self.tokenizer, self.pairs, world, beat, alive, self._asked_to_end
            )
            if translated is None:
                return
            scores, samples = translated
            if world.is_main:
                self.place.guard()
                lines = "".join(sample.to_line() for sample in samples)
                self.place.run.store.put(f"samples/step-{state.step:08d}.jsonl", lines.encode())
            found = {"bleu": scores.bleu, "chrf": scores.chrf, "sentences": scores.sentences}
            self._record_validation(state, {"translation": found}, started)
        if "samples" in measures:
            started = time.perf_counter()
            alive = functools.partial(self.place.heartbeat.phase, "sample", state.step)
            beat = functools.partial(alive, collective=True)
            engine, config, world = self.engine, self.config, self.place.world
            written = write_samples(engine, config, self.tokenizer, world, state.step, beat, alive, self._asked_to_end)
            if written is None:
                return
            if world.is_main:
                self._keep_samples(state.step, written)
            self._record_validation(state, {}, started)

    def _keep_samples(self, step: int, written: Samples) -> None:
        """Puts them into the run's directory; a store that refuses costs a warning."""
        self.place.guard()
        try:
            self.place.run.store.put(f"samples/prompts-{step:08d}.jsonl", written.lines.encode())
            if written.maps is not None:
                self.place.run.store.put(f"plots/attention-step-{step:08d}.png", written.maps)
        except StoreError as error:
            self.place.log.warning(f"samples are not kept: {error}")

    def _asked_to_end(self) -> bool:
        """Whether any rank was. A collective."""
        asked = any(all_reduce_sums([int(self.place.stop.reason)]))
        if asked:
            self.place.log.warning("the evaluation is left out: the run was asked to end")
        return asked

    def _record_validation(self, state: TrainingState, values: dict[str, Any], started: float) -> None:
        seconds = time.perf_counter() - started
        record = {"t": time.time(), "step": state.step, "validation": values, "validation_s": seconds}
        for sink in self.sinks:
            sink.write(record)

    def save(self, state: TrainingState) -> None:
        """Begins to save. A collective."""
        self.save_stall_s += self.saver.save(state)

    def copy_to_memory(self, state: TrainingState) -> None:
        """Begins a copy into the memory of the nodes. A collective."""
        self.save_stall_s += self.saver.copy_to_memory(state)

    def close(self) -> None:
        """Ends threads, sinks and the engine; the process group stays."""
        self.place.stop.close()
        for close in (self.loader.close, *(sink.close for sink in self.sinks), self.saver.close, self.engine.close):
            with contextlib.suppress(PretrainError):
                close()


def build_training(config: RunConfig, place: Place) -> Training:
    """Builds a run; a collective, entered by all ranks.

    Raises:
        PretrainError: of the first room that refuses, on every rank.
    """
    log = place.log
    attention = explain_attention(config.model, place.device, config.engine.precision)  # or refuses, on all ranks
    loader: Loader | RawLoader | None = None
    problem: PretrainError | None = None
    try:
        tokenizer = _tokenizer(config, place)
        known: dict[str, Any] = {"tokenizer_sha256": tokenizer.sha256, "special_ids": tokenizer.special_ids}
        loader = open_loader(config, None, place.world, **known)
        validation = open_validation(config, tokenizer.byte_lengths(), place.world, **known)
        pairs = held_out_pairs(config)
    except PretrainError as error:
        problem = error
    # Two votes, because the exit code says whether a restart can help: it cannot when the input is wrong.
    vote(not isinstance(problem, UserError), str(problem), error=UserError)
    vote(problem is None, str(problem), error=StoreError)
    assert loader is not None
    place.heartbeat.stage("data")
    if place.world.is_main:
        _announce(config, place, loader, str(attention))
    if config.model.kernels == "compiled":
        kept = keep_compiled(place.run.store.local_path(COMPILED))
        place.log.info("compiled kernels", cache=kept)
    model = build_model(
        config.model, config.loss, seed=config.seed, activation_checkpointing=config.engine.activation_checkpointing
    )
    place.heartbeat.stage("model")
    engine = Engine(model, config, place.world, place.device)
    place.heartbeat.stage("engine")
    tier = open_memory_tier(config.checkpoint, place.run, engine, place.world)
    saver = Saver(
        place.run.checkpoints,
        engine,
        place.world,
        attempt=place.attempt,
        config=config.checkpoint,
        guard=place.guard,
        beat=place.heartbeat.go_on,
        reporter=place.reporter,
        log=log,
        memory=MemorySaver(tier, engine, place.world, attempt=place.attempt, guard=place.guard, log=log),
        failures=_failures(place, from_memory=tier is not None),
    )
    sinks = open_sinks(config, place.run, place.world, place.attempt, log)
    throughput = Throughput(flops_per_step=0.0, peak_flops=None, total_steps=config.schedule.total_steps)
    own_work = OwnWork(lambda: engine.forward_s)
    times = StepTimes(engine, own_work, place.device)
    beat = place.heartbeat.go_on
    profiler = StepProfiler(config.metrics.profile, place.run.store, place.attempt, place.world.rank, log, beat)
    return Training(
        config, place, loader, validation, engine, tokenizer, pairs, saver, sinks, throughput, own_work, times, profiler
    )


def _failures(place: Place, *, from_memory: bool) -> FailureRate:
    """What the journal says; only rank 0 asks, and a journal that cannot be read costs the advice only."""
    if not place.world.is_main:
        return FailureRate()
    with contextlib.suppress(PretrainError):
        return count_failures([(e.kind, e.t, e.fields) for e in place.run.events()], from_memory=from_memory)
    return FailureRate()


def _announce(config: RunConfig, place: Place, loader: Loader | RawLoader, attention: str) -> None:
    """Says what will be trained on what."""
    place.log.info(f"data\n{loader.describe()}")
    shared = (
        {"experts_shared_by": sharing_ranks(config.engine, place.world.size)} if config.model.family == "moe" else {}
    )
    place.log.info(
        "model",
        parameters=parameter_counts(config.model).total,
        attention=attention,
        zero_stage=config.engine.zero_stage,
        precision=config.engine.precision,
        **shared,
    )
    if config.engine.precision == "bf16" and place.device.type == "cpu" and not computes_bf16():
        place.log.warning(
            "this processor has no instructions for bf16, which makes a step about twenty times slower than with "
            "engine.precision=fp32"
        )


def _tokenizer(config: RunConfig, place: Place) -> Tokenizer:
    """The run's tokenizer; rank 0 keeps a copy in the run's directory, so that the run is whole without its inputs."""
    store = place.run.store
    if store.exists(TOKENIZER_FILE):
        return Tokenizer(store.get(TOKENIZER_FILE), f"{store.url}/{TOKENIZER_FILE}")
    tokenizer = Tokenizer.load(config.tokenizer)
    if place.world.is_main:
        store.put(TOKENIZER_FILE, tokenizer.to_bytes())
    return tokenizer
