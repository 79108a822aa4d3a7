"""What the backward pass keeps of the forward pass, per family, counted from the layers' code. PURE.

Takes model and batch sections → elements that a micro-batch keeps. Each layer counts what its operations save for
their gradients, shared storage once: x enters norm and residual sum, the heads' matrix stays because values are a
view of it, attention keeps its rotated inputs and its output, a gated block its two halves and their product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
class Stack:
    """Equal layers over the same tokens, for one micro-batch.

    Attributes:
        num_layers: layers.
        tokens: that pass them.
        kept: elements per token that a layer keeps, its input included.
        input: elements per token of its input alone, which recomputation keeps.
        wide: elements per token of the widest gradient on the way back.
        fp32: fp32 numbers per token beside them (statistics of norms, logsumexp of attention).
        masks: bytes per token of dropout's masks.
    """

    num_layers: int
    tokens: int
    kept: int
    input: int
    wide: int
    fp32: int
    masks: int

    def layer_bytes(self, element_bytes: int) -> int:
        """What one layer keeps of a micro-batch."""
        return self.tokens * (self.kept * element_bytes + 4 * self.fp32 + self.masks)

    def kept_bytes(self, element_bytes: int, *, recomputed: bool) -> int:
        """What all layers keep of a micro-batch."""
        if recomputed:
            return self.num_layers * self.tokens * self.input * element_bytes
        return self.num_layers * self.layer_bytes(element_bytes)

    def gradient_bytes(self, element_bytes: int) -> int:
        """Widest gradients of one layer, with the sum that they are added to."""
        return self.tokens * self.wide * element_bytes


def stacks_of(model: AnyModelConfig, batch: BatchConfig) -> list[Stack]:
    """The stacks that a micro-batch passes, in order."""
    targets = batch.micro_batch_size * batch.sequence_length
    sources = batch.micro_batch_size * (batch.source_length or batch.sequence_length)
    if isinstance(model, DecoderConfig):
        return [_decoder(model, targets)]
    if isinstance(model, GemmaConfig):
        return [_gemma(model, targets)]
    if isinstance(model, MoEConfig):
        return [_moe(model, targets)]
    if isinstance(model, GPT2Config | EncoderConfig):
        return [_plain(model, model.num_layers, targets, cross_tokens=0)]
    encoder = _plain(model, model.num_encoder_layers, sources, cross_tokens=0)
    return [encoder, _plain(model, model.num_decoder_layers, targets, cross_tokens=sources)]


def _gemma(model: GemmaConfig, tokens: int) -> Stack:
    """The decoder's layer, a norm behind each block that keeps its input, and a gate that keeps its activated half."""
    layer = _decoder(model, tokens)
    return replace(layer, kept=layer.kept + 2 * model.width + model.feed_forward_width, fp32=layer.fp32 + 2)


def _moe(model: MoEConfig, tokens: int) -> Stack:
    """The decoder's layer with a gated block per expert of a token, each with its own copy of the input and output."""
    layer, hidden, chosen = _decoder(model, tokens), model.feed_forward_width, model.experts_per_token
    kept = layer.kept - 3 * hidden + chosen * (2 * model.width + 3 * hidden)
    wide = chosen * (4 * hidden + 2 * model.width)
    # Scores, probabilities and logsumexp of the router; places of the copies are 8 bytes each.
    return replace(layer, kept=kept, wide=wide, fp32=layer.fp32 + 2 * model.num_experts + 1 + 6 * chosen)


def _decoder(model: DecoderConfig | GemmaConfig | MoEConfig, tokens: int) -> Stack:
    head_width = model.width_per_head
    inside = model.num_heads * head_width
    keys = (model.num_kv_heads or model.num_heads) * head_width
    attention = (inside + 2 * keys) + (inside + keys) + inside  # one matrix, rotated, output
    norms = 2 * model.width
    kept = 2 * model.width + norms + attention + 3 * model.feed_forward_width
    statistics = 2 + model.num_heads + (model.num_heads + keys // head_width if model.qk_norm else 0)
    wide = 4 * model.feed_forward_width + 2 * model.width
    return Stack(model.num_layers, tokens, kept, model.width, wide, statistics, _masks(model, 2))


def _plain(
    model: GPT2Config | EncoderConfig | EncoderDecoderConfig | T5Config,
    num_layers: int,
    tokens: int,
    *,
    cross_tokens: int,
) -> Stack:
    """Attention without rotation and an ungated block; with `cross_tokens` also cross-attention to so many tokens."""
    head_width = model.width_per_head
    inside, hidden = model.num_heads * head_width, model.feed_forward_width
    gated = isinstance(model, T5Config) and model.feed_forward == "gated_gelu"
    block = (4 if gated else 2) * hidden  # both halves, the activated one, their product
    relu = isinstance(model, EncoderDecoderConfig) or (isinstance(model, T5Config) and not gated)
    block -= hidden if relu else 0  # ReLU keeps its output, which the next matrix reads
    attentions = 1 if cross_tokens == 0 else 2
    kept = attentions * (2 * model.width + 4 * inside) + 2 * model.width + block
    if cross_tokens:
        # Keys and values of the source are as many tokens as it has.
        kept += -2 * inside + -(-2 * inside * cross_tokens // tokens)
    statistics = attentions * (2 + model.num_heads) + 2
    sites = attentions + 1
    return Stack(num_layers, tokens, kept, model.width, 2 * hidden + 2 * model.width, statistics, _masks(model, sites))


def _masks(model: AnyModelConfig, sites: int) -> int:
    return sites * model.width if model.dropout else 0
