"""Models by family: the only way from a config to a module with its initial weights.

Adding a family: one file, one config class and one line of `_FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from pretrain.config.schema import AnyModelConfig, LossConfig
from pretrain.model.bert import Bert
from pretrain.model.decoder import Decoder
from pretrain.model.encoder_decoder import EncoderDecoder
from pretrain.model.gemma import Gemma
from pretrain.model.gpt2 import GPT2
from pretrain.model.init import initialise
from pretrain.model.kernels import use_kernels
from pretrain.model.moe import MoE
from pretrain.model.t5 import T5

_FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "decoder": Decoder,
    "encoder_decoder": EncoderDecoder,
    "encoder": Bert,
    "gpt2": GPT2,
    "t5": T5,
    "gemma": Gemma,
    "moe": MoE,
}


def family_names() -> list[str]:
    """Every family that can be built."""
    return list(_FAMILIES)


def build_model(
    model: AnyModelConfig, loss: LossConfig, *, seed: int, activation_checkpointing: bool = False, initial: bool = True
) -> nn.Module:
    """The model in fp32 on CPU with the initial weights of the seed; call it with a Batch to get LossSums.

    Args:
        initial: without it the weights are left as memory happens to be, for a caller that fills them (or, under
            `torch.device("meta")`, for one that only looks at their shapes).

    Raises:
        UserError: model.kernels cannot run here.
        KeyError: a family without a module (a mistake of whoever added it to the schema).
    """
    # cuDNN's attention has public NaN bugs in backward; the flash kernels are as fast. A flag only, also on CPU.
    torch.backends.cuda.enable_cudnn_sdp(False)
    module = _FAMILIES[model.family](model, loss, activation_checkpointing=activation_checkpointing)
    if initial:
        initialise(module, seed)
    use_kernels(module, model.kernels)
    return module
