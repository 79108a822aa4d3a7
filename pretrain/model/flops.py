"""Parameters and training FLOPs of a model, from its config alone. PURE: no torch.

    FLOPs per row = 3 * (2 * sum over matrices of (elements * tokens that pass it)
                         + sum over attentions of 4 * H * K * queries * keys [/ 2 when causal])

3 = forward + backward; a multiply-add is 2; the embedding's lookup, norms, biases, softmax and activations
are left out, and so is recomputation. A row counts as ONE document, full of tokens: rows of
several documents do less attention, so MFU errs on the low side of the work that was useful.
Source: Kaplan et al. 2020; Chowdhery et al. 2022, appendix B.
"""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config.schema import (
    AnyModelConfig,
    BatchConfig,
    DecoderConfig,
    EncoderConfig,
    EncoderDecoderConfig,
    GemmaConfig,
    GPT2Config,
    MoEConfig,
    T5Config,
)


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Elements of the trainable parameters; a tied matrix counts once.

    Attributes:
        total: all of them.
        embedding: the input table, also when it is tied to the output.
    """

    total: int
    embedding: int


def parameter_counts(model: AnyModelConfig) -> ParameterCounts:
    """Counts without building the model."""
    embedding = model.vocabulary_size * model.width
    outputs = 0 if model.tied_embeddings else embedding
    if isinstance(model, DecoderConfig):
        inside = _decoder_parameters(model)
    elif isinstance(model, EncoderConfig):
        inside = _encoder_parameters(model)
    elif isinstance(model, GPT2Config):
        inside = _gpt2_parameters(model)
    elif isinstance(model, GemmaConfig):
        inside = _gemma_parameters(model)
    elif isinstance(model, MoEConfig):
        inside = _moe_parameters(model)
    elif isinstance(model, T5Config):
        inside = _t5_parameters(model)
    else:
        inside = _encoder_decoder_parameters(model)
    return ParameterCounts(embedding + inside + outputs, embedding)


def expert_parameters(model: AnyModelConfig) -> int:
    """Elements of the parameters that ranks may share; 0 without experts."""
    if not isinstance(model, MoEConfig):
        return 0
    return model.num_layers * model.num_experts * 3 * model.width * model.feed_forward_width


def training_flops_per_row(model: AnyModelConfig, batch: BatchConfig) -> int:
    """FLOPs of forward and backward for one row (target row and its source row)."""
    if isinstance(model, DecoderConfig):
        return 3 * _decoder_forward(model, batch.sequence_length)
    if isinstance(model, EncoderConfig):
        return 3 * _encoder_forward(model, batch.sequence_length)
    if isinstance(model, GPT2Config):
        return 3 * _gpt2_forward(model, batch.sequence_length)
    if isinstance(model, GemmaConfig):
        return 3 * _gemma_forward(model, batch.sequence_length)
    if isinstance(model, MoEConfig):
        return 3 * _moe_forward(model, batch.sequence_length)
    return 3 * _encoder_decoder_forward(model, batch.source_length or batch.sequence_length, batch.sequence_length)


def training_flops_per_step(model: AnyModelConfig, batch: BatchConfig) -> int:
    """FLOPs of one optimizer step over all ranks, the optimizer itself left out."""
    return batch.global_batch_size * training_flops_per_row(model, batch)


def hardware_flops_per_step(model: AnyModelConfig, batch: BatchConfig, *, recomputed: bool) -> int:
    """FLOPs that the step really takes: the layers' forward pass once more where they are `recomputed`."""
    flops = training_flops_per_step(model, batch)
    if not recomputed:
        return flops
    outside = model.vocabulary_size * model.width  # the head is never computed again
    if isinstance(model, EncoderConfig):
        outside += model.width * model.width
    return flops + flops // 3 - batch.global_batch_size * 2 * outside * batch.sequence_length


def _decoder_parameters(model: DecoderConfig) -> int:
    head_width = model.width_per_head
    layer = _decoder_matrices(model) + 2 * model.width + (2 * head_width if model.qk_norm else 0)
    return model.num_layers * layer + model.width + (model.max_length or 0) * model.width


def _decoder_matrices(model: DecoderConfig | GemmaConfig) -> int:
    return _head_matrices(model) + 3 * model.width * model.feed_forward_width


def _head_matrices(model: DecoderConfig | GemmaConfig | MoEConfig) -> int:
    head_width = model.width_per_head
    return model.width * head_width * (2 * model.num_heads + 2 * (model.num_kv_heads or model.num_heads))


def _moe_matrices(model: MoEConfig, experts: int) -> int:
    """Of a layer with so many experts: heads, router, blocks."""
    router, block = model.num_experts * model.width, 3 * model.width * model.feed_forward_width
    return _head_matrices(model) + router + experts * block


def _moe_parameters(model: MoEConfig) -> int:
    head_width = model.width_per_head
    norms = 2 * model.width + (2 * head_width if model.qk_norm else 0)
    return model.num_layers * (_moe_matrices(model, model.num_experts) + norms) + model.width


def _moe_forward(model: MoEConfig, length: int) -> int:
    head_width = model.width_per_head
    matrices = model.num_layers * _moe_matrices(model, model.experts_per_token) + model.vocabulary_size * model.width
    return 2 * matrices * length + model.num_layers * 2 * model.num_heads * head_width * length * length


def _decoder_forward(model: DecoderConfig, length: int) -> int:
    head_width = model.width_per_head
    matrices = model.num_layers * _decoder_matrices(model) + model.vocabulary_size * model.width
    attention = model.num_layers * 2 * model.num_heads * head_width * length * length
    return 2 * matrices * length + attention


def _gemma_parameters(model: GemmaConfig) -> int:
    head_width = model.width_per_head
    layer = _decoder_matrices(model) + 4 * model.width + (2 * head_width if model.qk_norm else 0)
    return model.num_layers * layer + model.width


def _gemma_forward(model: GemmaConfig, length: int) -> int:
    matrices = model.num_layers * _decoder_matrices(model) + model.vocabulary_size * model.width
    heads = model.num_heads * model.width_per_head
    full = model.num_layers // model.full_every
    span = min(model.window, length)
    in_windows = (model.num_layers - full) * (length * span - span * span // 2)  # pairs of a window and its ramp
    return 2 * matrices * length + 4 * heads * (full * length * length // 2 + in_windows)


def _biased_attention(width: int) -> int:
    return 4 * width * width + 4 * width


def _biased_mlp(width: int, hidden: int) -> int:
    return 2 * width * hidden + hidden + width


def _encoder_parameters(model: EncoderConfig) -> int:
    width = model.width
    layer = _biased_attention(width) + _biased_mlp(width, model.feed_forward_width) + 4 * width
    head = width * width + 3 * width + model.vocabulary_size  # transform, its norm, a bias per entry
    return model.max_length * width + 2 * width + model.num_layers * layer + head


def _encoder_forward(model: EncoderConfig, length: int) -> int:
    width = model.width
    matrices = model.num_layers * (4 * width * width + 2 * width * model.feed_forward_width)
    matrices += width * width + model.vocabulary_size * width
    return 2 * matrices * length + model.num_layers * 4 * width * length * length


def _gpt2_parameters(model: GPT2Config) -> int:
    width = model.width
    layer = _biased_attention(width) + _biased_mlp(width, model.feed_forward_width) + 4 * width
    return model.max_length * width + model.num_layers * layer + 2 * width


def _gpt2_forward(model: GPT2Config, length: int) -> int:
    width = model.width
    matrices = model.num_layers * (4 * width * width + 2 * width * model.feed_forward_width)
    matrices += model.vocabulary_size * width
    return 2 * matrices * length + model.num_layers * 2 * width * length * length


def _t5_parameters(model: T5Config) -> int:
    attention, mlp = _square(model), _unbiased_mlp(model)
    encoder = model.num_encoder_layers * (attention + mlp + 2 * model.width)
    decoder = model.num_decoder_layers * (2 * attention + mlp + 3 * model.width)
    return encoder + decoder + 2 * (model.num_buckets * model.num_heads + model.width)  # biases and last norms


def _inside(model: EncoderDecoderConfig | T5Config) -> int:
    """Width of all heads together."""
    return model.num_heads * model.width_per_head


def _square(model: EncoderDecoderConfig | T5Config) -> int:
    """Elements of the four matrices of an attention."""
    return 4 * model.width * _inside(model)


def _unbiased_mlp(model: EncoderDecoderConfig | T5Config) -> int:
    gated = isinstance(model, T5Config) and model.feed_forward == "gated_gelu"
    return (3 if gated else 2) * model.width * model.feed_forward_width


def _encoder_decoder_parameters(model: EncoderDecoderConfig) -> int:
    attention = _biased_attention(model.width)
    mlp, norm = _biased_mlp(model.width, model.feed_forward_width), 2 * model.width
    encoder_layer = attention + mlp + 2 * norm
    decoder_layer = 2 * attention + mlp + 3 * norm
    return model.num_encoder_layers * encoder_layer + model.num_decoder_layers * decoder_layer


def _encoder_decoder_forward(model: EncoderDecoderConfig | T5Config, source_length: int, target_length: int) -> int:
    square, mlp, inside = _square(model), _unbiased_mlp(model), _inside(model)
    # Keys and values of cross-attention, half of its matrices, are made from the source.
    source_side = model.num_encoder_layers * (square + mlp) + model.num_decoder_layers * square // 2
    target_side = model.num_decoder_layers * (square + square // 2 + mlp) + model.vocabulary_size * model.width
    attention = model.num_encoder_layers * 4 * inside * source_length**2
    attention += model.num_decoder_layers * (2 * inside * target_length**2 + 4 * inside * target_length * source_length)
    return 2 * (source_side * source_length + target_side * target_length) + attention
