"""What accelerators can hold and do. PURE.

Takes `64xH100` → how many of which. Capacity and peak are the vendors'; the three rates of a training step are
fitted to half of the rows of a published table of sharded data-parallel training (see `benchmarks.published`), prices
are round list prices per hour that `--price` replaces.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pretrain.errors import UserError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One GPU and its share of the network.

    Attributes:
        memory_bytes: what a process can have, the driver's part left out.
        peak_flops: dense bf16, per second.
        matmul_fraction: of the peak, reached by matrix products of a training step.
        attention_fraction: of the peak, reached by causal attention (counted without the masked half).
        element_s: seconds per layer, channel and token of a pass, for norms, activations and residual sums.
        link_bytes_per_s: to the other GPUs of its node, one direction.
        network_bytes_per_s: of its network card, one direction.
        price_per_hour: dollars.
        estimated: the rates are those of a relative, scaled by peak and bandwidth, and not fitted.
    """

    name: str
    memory_bytes: int
    peak_flops: float
    matmul_fraction: float
    attention_fraction: float
    element_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    price_per_hour: float
    estimated: bool = False


_H100 = Accelerator("H100", 79 * GIB, 989e12, 0.677, 0.186, 46.6e-12, 450e9, 50e9, 2.5)
_A100 = Accelerator("A100-80GB", 79 * GIB, 312e12, 0.866, 0.336, 87.2e-12, 300e9, 25e9, 1.5)
ACCELERATORS = {
    accelerator.name: accelerator
    for accelerator in (
        _H100,
        _A100,
        Accelerator("A100-40GB", 39 * GIB, 312e12, 0.866, 0.336, 112e-12, 300e9, 25e9, 1.2, True),
        Accelerator("H200", 139 * GIB, 989e12, 0.677, 0.186, 32.5e-12, 450e9, 50e9, 3.5, True),
        Accelerator("B200", 178 * GIB, 2250e12, 0.677, 0.186, 19.5e-12, 900e9, 50e9, 5.0, True),
        Accelerator("L40S", 44 * GIB, 362e12, 0.677, 0.186, 181e-12, 32e9, 12.5e9, 1.0, True),
    )
}
GPUS_PER_NODE = 8
_ALIASES = {"A100": "A100-80GB", "H100-80GB": "H100", "A100-80G": "A100-80GB", "A100-40G": "A100-40GB"}


def parse_gpus(text: str) -> tuple[int, Accelerator]:
    """`64xH100` → 64 and the accelerator. Raises UserError."""
    match = re.fullmatch(r"(\d+)\s*[xX]\s*([A-Za-z0-9-]+)", text.strip())
    name = _ALIASES.get(match[2].upper(), match[2].upper()) if match else ""
    if match is None or int(match[1]) < 1 or name not in ACCELERATORS:
        raise UserError(
            f"--gpus={text} is not a number of GPUs of a known kind. Write 64xH100; known are "
            f"{', '.join(ACCELERATORS)}. Correct it."
        )
    return int(match[1]), ACCELERATORS[name]
