"""How weights start, how fast they learn and what is multiplied, as width and depth grow. PURE but for `slow_down`.

Takes a decoder's config -> the factors that its modules use. Standard: N(0, init_std), what is added to the
residual stream / sqrt(2 layers). muP with m = width / base width, for Adam: matrices from width to width
start / sqrt(m) and learn at 1 / m of the rate; tables of the vocabulary and of places start and learn as at the
base; logits / m; scores by 1 / K instead of 1 / sqrt(K). Of m = 1 nothing remains.
Sources: Radford et al. 2019 (depth); Yang et al. 2022, table 8 (muP); Yang et al. 2023 (branches by depth); Wang et
al. 2022, figure 2 (DeepNorm).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from pretrain.config.schema import DecoderConfig, EncoderConfig, EncoderDecoderConfig, GPT2Config, MoEConfig
from pretrain.model.init import Initial, Normal
from pretrain.model.layers import Linear


@dataclass(frozen=True, slots=True)
class Scaling:
    """The factors of one model.

    Attributes:
        table: initial weights of tables by token or by place.
        inner, outer: of matrices inside a block, and of those that write to the residual stream.
        branch: factor of what a block adds to the residual stream.
        output: factor of what the head reads.
        rate: factor of the learning rate of the matrices inside the layers.
        base_head_width: head width at which scores have 1 / sqrt(K), or None for every width.
    """

    table: Initial
    inner: Initial
    outer: Initial
    branch: float
    output: float
    rate: float
    base_head_width: int | None

    @classmethod
    def of(cls, config: DecoderConfig | GPT2Config | MoEConfig) -> Scaling:
        mup = None if isinstance(config, MoEConfig) else config.mup
        wider = 1.0 if mup is None else config.width / mup.base_width
        std, depth = config.init_std / math.sqrt(wider), math.sqrt(2 * config.num_layers)
        return cls(
            table=Normal(config.init_std),
            inner=Normal(std),
            outer=Normal(std / depth if config.depth_scaling == "initial" else std),
            branch=1.0 / depth if config.depth_scaling == "branch" else 1.0,
            output=1.0 / wider,
            rate=1.0 / wider,
            base_head_width=None if mup is None else mup.base_head_width or config.width_per_head,
        )

    def of_scores(self, head_width: int) -> float:
        """Factor of q k^T."""
        if self.base_head_width is None:
            return 1.0 / math.sqrt(head_width)
        return math.sqrt(self.base_head_width) / head_width

    def slow_down(self, layers: nn.Module) -> None:
        """Tells the projections inside the layers their share of the learning rate."""
        for module in layers.modules():
            if isinstance(module, Linear):
                module.learning_rate_scale = self.rate


@dataclass(frozen=True, slots=True)
class DeepNorm:
    """The factors of one stack of post-norm layers, norm(keep * x + f(x)); 1 and 1 is plain post-norm.

    Attributes:
        keep: factor of the residual stream in each sum.
        gain: factor of the initial values, the output and the feed-forward matrices; not of queries and keys.
    """

    keep: float = 1.0
    gain: float = 1.0

    @classmethod
    def of(cls, config: EncoderConfig | EncoderDecoderConfig, *, decoder: bool = False) -> DeepNorm:
        if config.depth_scaling == "none":
            return cls()
        if isinstance(config, EncoderConfig):
            return cls((2 * config.num_layers) ** 0.25, (8 * config.num_layers) ** -0.25)
        if decoder:
            return cls((3 * config.num_decoder_layers) ** 0.25, (12 * config.num_decoder_layers) ** -0.25)
        both = (config.num_encoder_layers**4 * config.num_decoder_layers) ** (1 / 16)
        return cls(0.81 * both, 0.87 / both)


def scaled(x: Tensor, factor: float) -> Tensor:
    """x times a factor; 1 costs nothing."""
    return x if factor == 1.0 else x * factor
