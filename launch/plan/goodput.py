"""What failures cost, and how often to save. PURE.

Takes the mean time between failures M, the stall of a save d, the time of a restart r → the share of time that is
progress. With exponential failures a segment of t seconds of work takes on average M e^(r/M) (e^((t + d)/M) - 1)
seconds, lost work included (Daly 2006, equation 13); the best t solves Daly's expansion, whose first term is Young's.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

# Unexpected interruptions of Llama 3's training: 419 in 54 days of 16,384 GPUs (Dubey et al. 2024, section 3.3.4).
MTBF_PER_GPU_S = 16384 * 54 * 86400 / 419
RESTART_S = 60.0  # of a large run: detection, start of all ranks, restore
COPY_BYTES_PER_S = 10e9  # of a save: from device to host memory, which is all that a step waits for


@dataclass(frozen=True, slots=True)
class Goodput:
    """Progress under failures.

    Attributes:
        mtbf_s: mean time between failures of the whole machine.
        fraction: of the time, progress, with the config's interval.
        best_fraction: the same with `best_interval_s`.
    """

    mtbf_s: float
    save_stall_s: float
    interval_s: float
    fraction: float
    best_interval_s: float
    best_fraction: float
    failures_per_day: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def goodput(
    *,
    ranks: int,
    interval_s: float,
    save_stall_s: float,
    mtbf_per_gpu_s: float = MTBF_PER_GPU_S,
    restart_s: float = RESTART_S,
) -> Goodput:
    """Goodput of a run that saves every `interval_s` seconds of work."""
    mtbf = mtbf_per_gpu_s / ranks
    best = daly_interval(save_stall_s, mtbf)
    return Goodput(
        mtbf_s=mtbf,
        save_stall_s=save_stall_s,
        interval_s=interval_s,
        fraction=progress_fraction(interval_s, save_stall_s, mtbf, restart_s),
        best_interval_s=best,
        best_fraction=progress_fraction(best, save_stall_s, mtbf, restart_s),
        failures_per_day=86400.0 / mtbf,
    )


def young_interval(save_stall_s: float, mtbf_s: float) -> float:
    """sqrt(2 d M)."""
    return math.sqrt(2.0 * save_stall_s * mtbf_s)


def daly_interval(save_stall_s: float, mtbf_s: float) -> float:
    """Seconds of work between two saves that waste the least time."""
    if save_stall_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = save_stall_s / (2.0 * mtbf_s)
    return young_interval(save_stall_s, mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - save_stall_s


def progress_fraction(interval_s: float, save_stall_s: float, mtbf_s: float, restart_s: float) -> float:
    """Work done over time passed, between 0 and 1."""
    exponent = (interval_s + save_stall_s) / mtbf_s
    if exponent + restart_s / mtbf_s > 500.0:
        return 0.0
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent))


def save_stall_s(parameters: int, ranks: int) -> float:
    """Seconds of the copy of a rank's masters and two moments, fp32 each, to host memory."""
    return 12.0 * parameters / ranks / COPY_BYTES_PER_S
