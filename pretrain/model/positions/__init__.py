"""Where a token stands inside its document: rotary angles, tables, and biases by relative place.

Takes positions that restart in every document (`SeqInfo.positions`) or relative places of attention.
Nothing here is a buffer: what is computed is computed on the fly in fp32, because casting a module to
bf16 would round it (position 257 would become 256).
"""

from pretrain.model.positions.absolute import LearnedPositions, sinusoids
from pretrain.model.positions.relative import RelativePositionBias, alibi_bias, alibi_slopes, relative_buckets
from pretrain.model.positions.rotary import Rotary, rotary_angles, rotate
from pretrain.model.positions.scaling import rotary_frequencies

__all__ = [
    "LearnedPositions",
    "RelativePositionBias",
    "Rotary",
    "alibi_bias",
    "alibi_slopes",
    "relative_buckets",
    "rotary_angles",
    "rotary_frequencies",
    "rotate",
    "sinusoids",
]
