"""Speed of a run: step time, tokens per second, MFU, time left. PURE apart from its clock.

MFU = model FLOPs of one step / (seconds of one step x ranks x peak FLOP/s of one rank), with
model FLOPs = 6 per weight and token plus attention, causal attention counted as half, no credit
for recomputation (`pretrain.model.flops`; PaLM, Chowdhery et al. 2022, appendix B). HFU counts that too.
Rates are of the steps since the last record and of this attempt only, so they stay true after a
resume; validation, saving and sampling are excluded from them and included in the time left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """Speed since the last record; fields as in `definitions`. None: not known yet."""

    steps: int
    step_s: float | None
    tokens_per_second: float | None
    mfu: float | None
    hfu: float | None
    eta_s: float | None

    def to_record(self) -> dict[str, float | int | None]:
        return asdict(self)


class Throughput:
    """Clock of the training loop. Make it just before the first step of the attempt.

    Attributes:
        peak_flops: FLOP/s of one rank that MFU is of.

    ```
    throughput = Throughput(flops_per_step=f, peak_flops=peak, ranks=2, total_steps=400)
    …one step…;  throughput.finish_step(target_tokens)
    with throughput.excluded(): validate()
    record |= throughput.rates(step).to_record()
    ```
    """

    def __init__(
        self,
        *,
        flops_per_step: int | float,
        peak_flops: int | float | None,
        total_steps: int,
        ranks: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            flops_per_step: model FLOPs of one optimizer step, all ranks together.
            peak_flops: FLOP/s that one rank could reach; None leaves MFU and HFU out.
            total_steps: optimizer steps of the run.
            clock: monotonic seconds.
        """
        self._flops_per_step = flops_per_step
        self.peak_flops, self._ranks = peak_flops, ranks
        self._total_steps = total_steps
        self._clock = clock
        self._window_start = clock()
        self._window_excluded_s = 0.0
        self._window_steps = 0
        self._window_tokens = 0
        self._window_flops = self._window_hardware = 0.0
        self._settled_flops = 0.0  # of the steps after the first
        self._steps = 0
        self._settled_at: float | None = None  # end of the first step: later ones are typical, that one is not
        self._last_step_at: float | None = None

    def finish_step(
        self, target_tokens: int, *, flops: int | float | None = None, hardware_flops: int | float | None = None
    ) -> None:
        """Counts one optimizer step with its global number of targets.

        Args:
            flops: model FLOPs of this step where steps differ.
            hardware_flops: with what is computed again; the model's if not given.
        """
        flops = self._flops_per_step if flops is None else flops
        self._window_flops += flops
        self._window_hardware += flops if hardware_flops is None else hardware_flops
        if self._settled_at is not None:
            self._settled_flops += flops
        self._steps += 1
        self._window_steps += 1
        self._window_tokens += target_tokens
        self._last_step_at = self._clock()
        if self._settled_at is None:
            self._settled_at = self._last_step_at

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Time that is not training: validation, saving, sampling."""
        start = self._clock()
        try:
            yield
        finally:
            self._window_excluded_s += self._clock() - start

    def rates(self, step: int, *, flops_left: int | float | None = None) -> Rates:
        """Rates of the steps since the last call.

        Args:
            step: optimizer steps done in the whole run.
            flops_left: model FLOPs of all steps to come where steps differ.
        """
        now = self._clock()
        seconds = now - self._window_start - self._window_excluded_s
        steps, tokens, flops = self._window_steps, self._window_tokens, self._window_flops
        hardware = self._window_hardware
        self._window_start, self._window_excluded_s = now, 0.0
        self._window_steps = self._window_tokens = 0
        self._window_flops = self._window_hardware = 0.0
        if steps == 0 or seconds <= 0:
            return Rates(steps, None, None, None, None, self._eta_s(step, None, flops_left))
        step_s = seconds / steps
        mfu = hfu = None
        if self.peak_flops:
            possible = seconds * self._ranks * self.peak_flops
            mfu, hfu = flops / possible, hardware / possible
        return Rates(steps, step_s, tokens / seconds, mfu, hfu, self._eta_s(step, step_s, flops_left))

    def _eta_s(self, step: int, step_s: float | None, flops_left: int | float | None) -> float | None:
        left = self._total_steps - step
        if left <= 0:
            return 0.0
        if self._steps >= 2 and self._settled_at is not None and self._last_step_at is not None:
            seconds = self._last_step_at - self._settled_at
            if flops_left is not None and self._settled_flops:
                return flops_left * seconds / self._settled_flops
            return left * seconds / (self._steps - 1)
        return None if step_s is None else left * step_s
