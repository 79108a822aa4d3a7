"""The engine: DeepSpeed behind the few calls that the loop needs.

takes -> model (fp32, initial weights), config, place; then micro-batches; gives -> sums, outcomes, and
its state as fragments. Invariants: the gradient is that of the objective's sum divided once by the
global number of targets, whatever the split over ranks and micro-batches; masters start at the exact
fp32 weights of the model; a non-finite gradient changes nothing on any rank at any stage; evaluation
touches no training state. Every method is a collective unless it says otherwise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from pretrain.config.schema import RunConfig
from pretrain.engine.distributed import collective, limit_collectives
from pretrain.engine.experts import connect_experts, mark_group, share_experts
from pretrain.engine.layout import (
    MOMENTUM,
    find_holders,
    find_slots,
    fixed_fragments,
    fresh_state,
    has_whole_momenta,
    publish_masters,
    release_weights,
    whole_momenta,
)
from pretrain.engine.parameters import group_of_each, optimizer_of, persistent_buffers
from pretrain.engine.quiet import load_deepspeed, silenced
from pretrain.engine.state import (
    MASTER,
    Fragment,
    OptimizerSpec,
    Scalars,
    probe_optimizer,
    share_of_replicated,
)
from pretrain.engine.zero import accumulation_steps, clips_itself, deepspeed_config, most_accumulated, sharing_ranks
from pretrain.errors import PretrainError
from pretrain.loss.sums import LossSums
from pretrain.sequence import Batch
from pretrain.topology import World


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What an optimizer step did, the same on every rank.

    Attributes:
        applied: False when the gradient was not finite and nothing changed.
        gradient_norm: global L2 norm before clipping; inf when not applied.
    """

    applied: bool
    gradient_norm: float


class Engine:
    """One model, its optimizer and its sharding on this rank.

    Attributes:
        accumulation_steps: micro-batches of this rank in this step, empty ones included; see `begin_step`.
        deepspeed_engine: for benchmarks; nobody else calls it.
        forward_s, backward_s, optimizer_s: wall seconds of each so far. Forward is this rank's own work on CPU at ZeRO
            stages 0 to 2; elsewhere there are waits for other ranks in it; on CUDA it is the time to launch kernels.
    """

    def __init__(self, model: nn.Module, config: RunConfig, world: World, device: torch.device) -> None:
        """Shards the model. `start_process_group` comes first.

        Raises:
            PretrainError: DeepSpeed understood the config otherwise than it was meant.
        """
        largest = most_accumulated(config, world.size)
        self.accumulation_steps = accumulation_steps(config.batch, world.size)
        self._divisor = accumulation_steps(largest, world.size)
        self._world, self._config, self._device = world, config.engine, device
        self._clipping = config.optimizer.gradient_clipping
        self._clips_itself = clips_itself(config.engine)
        self.forward_s = self.backward_s = self.optimizer_s = 0.0
        self._microstep = 0
        self._reduction: ExitStack | None = None
        deepspeed = load_deepspeed(device)
        self._buffers = persistent_buffers(model)
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self._shapes |= {name: tuple(model.get_buffer(name).shape) for name in self._buffers}
        initial = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        sharing = sharing_ranks(config.engine, world.size)
        self._first = share_experts(model, sharing, world)
        optimizer = optimizer_of(model, config.optimizer)
        self._spec = probe_optimizer(optimizer)
        self._group_names = [str(group["name"]) for group in optimizer.param_groups]
        self._rate_scales = [float(group["learning_rate_scale"]) for group in optimizer.param_groups]
        self._groups = group_of_each(model, optimizer, self._buffers)
        if sharing > 1:
            mark_group(optimizer, sharing)
        settings = deepspeed_config(config.engine, largest, config.optimizer, world.size)
        with collective("deepspeed initialize"), silenced():
            self.deepspeed_engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        if sharing > 1:
            connect_experts(self.module, sharing)
        limit_collectives(timedelta(seconds=config.health.collective_timeout_s))
        self._gathered = deepspeed.zero.GatheredParameters
        self._check_understood(settings)
        self._start_exactly(initial)

    @property
    def module(self) -> nn.Module:
        """The model; at stage 3 its parameters are sharded. No collective."""
        module: nn.Module = self.deepspeed_engine.module
        return module

    # --------------------------------------------------------------------------------------- training

    def begin_step(self, micro_batches: int) -> None:
        """Says how many micro-batches of this rank the next step has. No collective.

        Raises:
            RuntimeError: another step has begun, or the config has no step with so many.
        """
        if self._microstep or not 1 <= micro_batches <= self._divisor:
            raise RuntimeError(f"a step of {micro_batches} micro-batches after {self._microstep} of another")
        self.accumulation_steps = micro_batches

    def micro_step(
        self, batch: Batch, *, global_target_tokens: int, watching: AbstractContextManager[None] | None = None
    ) -> LossSums:
        """Forward and backward of one micro-batch; gives its detached sums.

        Args:
            global_target_tokens: targets of the whole step over all ranks; 0 gives a zero gradient.
            watching: open during the forward pass, not while layers are computed again in the backward pass.

        Raises:
            PeerFailedError: another rank is gone.
            RuntimeError: more calls than `accumulation_steps` without `step`.
        """
        if self._microstep == self.accumulation_steps:
            raise RuntimeError(f"micro_step called more than {self.accumulation_steps} times before step")
        engine = self.deepspeed_engine
        first, last = self._microstep == 0, self._microstep == self.accumulation_steps - 1
        with collective("forward and backward"):
            if first and self._config.reduce_once and self._config.zero_stage >= 2 and not last:
                self._reduction = ExitStack()
                self._reduction.enter_context(engine.coalesce_grad_reduction())
            elif self._reduction is None:
                engine.set_gradient_accumulation_boundary(last)
            started = time.perf_counter()
            with watching or nullcontext():
                sums: LossSums = engine(batch)
            forward_ended = time.perf_counter()
            self.forward_s += forward_ended - started
            # DeepSpeed divides by the ranks (gradient average) and by the accumulation steps (backward).
            scale = self._world.size * self._divisor / max(1, global_target_tokens)
            engine.backward(sums.objective * scale)
            if last and self._reduction is not None:
                self._reduction.close()
                self._reduction = None
                engine.set_gradient_accumulation_boundary(True)
            self.backward_s += time.perf_counter() - forward_ended
        self._microstep += 1
        return LossSums(*(value.detach() for value in sums))

    def step(self, learning_rate: float) -> StepOutcome:
        """Clips and applies the accumulated gradient at `learning_rate`, or skips it on all ranks.

        Raises:
            PeerFailedError: another rank is gone.
            RuntimeError: not all micro-batches of the step were given.
        """
        if self._microstep != self.accumulation_steps:
            raise RuntimeError(f"step after {self._microstep} of {self.accumulation_steps} micro-batches")
        self._microstep = 0
        started = time.perf_counter()
        try:
            return self._step(learning_rate)
        finally:
            self.optimizer_s += time.perf_counter() - started

    def _step(self, learning_rate: float) -> StepOutcome:
        engine = self.deepspeed_engine
        for group, scale in zip(engine.basic_optimizer.param_groups, self._rate_scales, strict=True):
            group["lr"] = learning_rate * scale
        with collective("optimizer step"):
            if self._clips_itself:
                return self._step_replicated_fp32()
            engine.step()
        applied = bool(engine.was_step_applied())
        norm = engine.get_global_grad_norm()
        return StepOutcome(applied, float(norm) if applied and norm is not None else math.inf)

    def _step_replicated_fp32(self) -> StepOutcome:
        """Stage 0 fp32: every rank holds the same reduced gradient, so all decide alike without a word."""
        engine = self.deepspeed_engine
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        norms = torch.stack([gradient.double().norm() for gradient in gradients])
        norm = float(norms.norm())
        if not math.isfinite(norm):
            engine.zero_grad()
            return StepOutcome(False, math.inf)
        if self._clipping > 0:
            excess = (norm + 1e-6) / self._clipping  # as DeepSpeed does at the other stages
            if excess > 1:
                torch._foreach_mul_(gradients, 1.0 / excess)
        engine.step()
        return StepOutcome(True, norm)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> LossSums:
        """Sums of a micro-batch in evaluation mode; nothing of the training state changes.

        Raises:
            PeerFailedError: another rank is gone.
        """
        module = self.module
        training = module.training
        module.eval()
        try:
            with collective("evaluation"):
                sums: LossSums = module(batch)
                return sums
        finally:
            module.train(training)

    @contextmanager
    def gathered_weights(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """Whole weights by name, as the model computes with them, on every rank while the context is open."""
        named = dict(self.module.named_parameters())
        with ExitStack() as stack:
            if self._config.zero_stage == 3:
                stack.enter_context(self._gathered(list(named.values())))
            yield {name: parameter.data for name, parameter in named.items()}

    def close(self) -> None:
        """Removes DeepSpeed's hooks; the process group stays. No collective."""
        self.deepspeed_engine.destroy()

    # ------------------------------------------------------------------------------------------ state

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter and persistent buffer with its whole shape. No collective."""
        return dict(self._shapes)

    def groups(self) -> dict[str, str]:
        """The optimizer's group of each of them. No collective."""
        return dict(self._groups)

    def optimizer_spec(self) -> OptimizerSpec:
        """What the optimizer keeps. No collective."""
        return self._spec

    def fragments(self) -> list[Fragment]:
        """This rank's share of the state; over the ranks every element is in exactly one. No collective."""
        trained = self._trained_fragments()
        own, replicated = fixed_fragments(self.deepspeed_engine, self._buffers)
        if self._config.zero_stage == 0:
            trained, replicated = [], [*trained, *replicated]
        return [*trained, *own, *share_of_replicated(replicated, self._world.rank, self._world.size)]

    def optimizer_scalars(self) -> Scalars:
        """Per-group numbers of the optimizer (Adam's step); empty before the first step. No collective."""
        state = self.deepspeed_engine.basic_optimizer.state
        scalars: Scalars = {}
        for holder, group in find_holders(self.deepspeed_engine):
            keys, kept = self._spec.groups[self._group_names[group]].scalar_keys, state.get(holder, {})
            values = {key: float(kept[key]) for key in keys if key in kept}
            if values:
                scalars.setdefault(self._group_names[group], values)
        return scalars

    def hyperparameters(self) -> dict[str, dict[str, Any]]:
        """The optimizer's settings by group name, for the record. No collective."""
        groups = self.deepspeed_engine.basic_optimizer.param_groups
        return {
            name: {key: value for key, value in group.items() if isinstance(value, float | int | bool | tuple)}
            for name, group in zip(self._group_names, groups, strict=True)
        }

    def begin_restore(self, element_keys: Mapping[str, tuple[str, ...]], scalars: Scalars) -> list[Fragment]:
        """Prepares the state for being overwritten; gives the fragments to fill (whole ones where replicated).

        Args:
            element_keys: per-element optimizer keys that will be filled, by group; none means a fresh optimizer.
            scalars: the optimizer's numbers by group name.
        """
        engine = self.deepspeed_engine
        release_weights(engine)
        optimizer = engine.basic_optimizer
        for holder, group in find_holders(engine):
            name, settings = self._group_names[group], optimizer.param_groups[group]
            optimizer.state.pop(holder, None)
            if not element_keys.get(name) and not scalars.get(name):
                continue
            on_device = settings.get("fused") or settings.get("capturable")
            state = optimizer.state[holder]
            for key in element_keys.get(name, ()):
                state[key] = fresh_state(engine, holder, group, key)
            for key, value in scalars.get(name, {}).items():
                # A tensor of its own per holder: torch's optimizers count in place.
                state[key] = torch.tensor(value, dtype=torch.float32, device=holder.device if on_device else "cpu")
        own, replicated = fixed_fragments(engine, self._buffers)
        return [*self._trained_fragments(whole_momenta_too=True), *own, *replicated]

    def end_restore(self) -> None:
        """Makes the computing weights follow the filled masters."""
        with collective("restore"):
            publish_masters(self.deepspeed_engine)
        self._microstep = 0

    # ---------------------------------------------------------------------------------------- private

    def _trained_fragments(self, *, whole_momenta_too: bool = False) -> list[Fragment]:
        """Masters and their optimizer state on this rank.

        Args:
            whole_momenta_too: Muon's momentum as a fragment of its own where a rank holds more of it than of the
                masters (stages 1 and 2), for all of it must be filled; without, the part that belongs to the masters.
        """
        engine = self.deepspeed_engine
        optimizer = engine.basic_optimizer
        elsewhere = [has_whole_momenta(engine, group) for group in optimizer.param_groups]
        momenta = whole_momenta(engine) if any(elsewhere) else {}
        fragments = []
        for slot in find_slots(engine):
            kept = optimizer.state.get(slot.holder, {})
            keys = self._spec.groups[self._group_names[slot.group]].element_keys
            views = {MASTER: _range(slot.holder, slot.offset, slot.length)}
            if not elsewhere[slot.group]:
                views |= {k: _range(kept[k], slot.offset, slot.length) for k in keys if kept.get(k) is not None}
            elif slot.name in momenta and not whole_momenta_too:
                buffer, first = momenta[slot.name]
                views[MOMENTUM] = _range(buffer, first + slot.start, slot.length)
            # Of shared experts a rank's parameter is a part: its numbers go on from those of the ranks before.
            start = self._first.get(slot.name, 0) + slot.start
            fragments.append(Fragment(slot.name, self._shapes[slot.name], start, views))
        if whole_momenta_too:
            for name, (buffer, first) in momenta.items():
                shape = self._shapes[name]
                fragments.append(Fragment(name, shape, 0, {MOMENTUM: _range(buffer, first, math.prod(shape))}))
        return fragments

    def _start_exactly(self, initial: Mapping[str, torch.Tensor]) -> None:
        """Writes the model's fp32 values into the masters, which DeepSpeed rounded to bf16 (or stepped once)."""
        optimizer = self.deepspeed_engine.basic_optimizer
        for holder, _ in find_holders(self.deepspeed_engine):
            # Stage 0 bf16 takes a step with a zero gradient while it initialises: it counts and decays.
            optimizer.state.pop(holder, None)
        with torch.no_grad():
            for fragment in self._trained_fragments():
                source = initial[fragment.name].view(-1)[fragment.start : fragment.start + fragment.length]
                fragment.tensors[MASTER].copy_(source)

    def _check_understood(self, settings: Mapping[str, Any]) -> None:
        """DeepSpeed ignores unknown keys, so what it took over is compared with what was meant."""
        engine = self.deepspeed_engine
        understood = {
            "train_batch_size": engine.train_batch_size(),
            "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
            "gradient_clipping": engine.gradient_clipping(),
            "bf16": settings["bf16"] if engine.bfloat16_enabled() == settings["bf16"]["enabled"] else "another",
            "zero_allow_untested_optimizer": engine.zero_allow_untested_optimizer(),
        }
        wrong = [f"{key}={value}" for key, value in understood.items() if settings[key] != value]
        offloaded = bool(engine.zero_use_cpu_optimizer())
        if offloaded != (self._config.offload_optimizer == "cpu"):
            wrong.append(f"offload of the optimizer={offloaded}")
        if engine.bf16_optimizer_states() != (self._config.state_precision == "bf16"):
            wrong.append(f"bf16_optimizer_states={engine.bf16_optimizer_states()}")
        if int(engine.zero_optimization_stage()) != self._config.zero_stage:
            wrong.append(f"zero stage={engine.zero_optimization_stage()}")
        if wrong:
            raise PretrainError(
                f"DeepSpeed took over {', '.join(wrong)}, which differs from the config. "
                "Its version may not fit: install the one of constraints.txt."
            )


def _range(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
    return tensor.detach().view(-1)[first : first + count]
