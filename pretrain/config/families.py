"""The model section of a config: one class per family, and what all share."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pretrain.config.section import Section, setting
from pretrain.config.units import Flag, Fraction, NonNegativeReal, PositiveInt, PositiveReal

AttentionBackend = Literal[
    "auto", "varlen", "varlen_fa2", "varlen_fa3", "varlen_fa4", "flash", "split", "flex", "qblock", "sdpa", "reference"
]


Layout = Literal["decoder", "encoder_decoder", "encoder"]


class ModelConfig(Section):
    """What all families share.

    Attributes:
        layout: which sides a family has, and so which objectives train it.
    """

    layout: ClassVar[Layout]
    vocabulary_size: PositiveInt = setting("V, at least the tokenizer's", resume="refused")
    width: PositiveInt = setting("D, model width", resume="refused")
    num_heads: PositiveInt = setting("H, query heads", resume="refused")
    feed_forward_width: PositiveInt = setting("F, hidden width of the feed-forward block", resume="refused")
    tied_embeddings: Flag = setting("input and output embedding are one tensor", resume="refused", default=True)
    dropout: Fraction = setting(
        "dropout on embeddings and sublayer outputs, keyed by (seed, step, micro-batch)",
        resume="logged",
        default=0.0,
        lt=1,
    )
    attention_dropout: Fraction = setting(
        "dropout on the weights of attention, keyed likewise; only backends that compute it exactly (qblock, "
        "reference) run it",
        resume="logged",
        default=0.0,
        lt=1,
    )
    attention: AttentionBackend = setting(
        "attention backend; auto chooses and logs, a named one that cannot run is an error",
        resume="logged",
        default="auto",
    )
    # Refused: compiled code rounds otherwise, so a run that began with it never goes on without.
    kernels: Literal["eager", "compiled", "liger"] = setting(
        "what computes norms, rotations, gates and the loss: torch's operators, torch.compile of them (a graph "
        "break is an error), or the Liger kernels on CUDA",
        resume="refused",
        default="eager",
    )

    @property
    def width_per_head(self) -> int:
        """K: `head_width` where a family has one and it is set, otherwise an equal share of the model's width."""
        return getattr(self, "head_width", None) or self.width // self.num_heads


class LinearRope(Section):
    """Every rotary frequency divided by the factor (position interpolation)."""

    kind: Literal["linear"] = "linear"
    factor: PositiveReal = setting("how many times longer sequences become, at least 1", resume="logged", ge=1)


class NtkRope(Section):
    """A larger base: the lowest frequency is divided by the factor, the highest stays (NTK-aware)."""

    kind: Literal["ntk"] = "ntk"
    factor: PositiveReal = setting("how many times longer sequences become, at least 1", resume="logged", ge=1)


class YarnRope(Section):
    """Low frequencies divided, high ones kept, a ramp between, and sharper attention (YaRN)."""

    kind: Literal["yarn"] = "yarn"
    factor: PositiveReal = setting("how many times longer sequences become, at least 1", resume="logged", ge=1)
    original_sequence_length: PositiveInt = setting("tokens of the training before the scaling", resume="logged")
    beta_fast: PositiveReal = setting(
        "turns within the original length above which a frequency is kept", resume="logged", default=32.0
    )
    beta_slow: PositiveReal = setting(
        "turns within the original length below which a frequency is divided", resume="logged", default=1.0
    )
    attention_factor: PositiveReal | None = setting(
        "factor of cos and sin; none means 0.1 ln(factor) + 1", resume="logged", default=None
    )


class Llama3Rope(Section):
    """Long waves divided by the factor, short ones kept, a smooth change between (Llama 3.1)."""

    kind: Literal["llama3"] = "llama3"
    factor: PositiveReal = setting("how many times longer sequences become, at least 1", resume="logged", ge=1)
    original_sequence_length: PositiveInt = setting("tokens of the training before the scaling", resume="logged")
    low_freq_factor: PositiveReal = setting(
        "waves longer than the original length / this are divided", resume="logged", default=1.0
    )
    high_freq_factor: PositiveReal = setting(
        "waves shorter than the original length / this are kept", resume="logged", default=4.0
    )


RopeScaling = Annotated[LinearRope | NtkRope | YarnRope | Llama3Rope, Field(discriminator="kind")]


class MuPConfig(Section):
    """Maximal update parametrisation: what was tuned at a small width holds at this one (for AdamW).

    With m = width / base_width, matrices between the layers start with a variance of 1/m and learn at 1/m of
    the rate, logits are divided by m, and scores fall with the head's width instead of its root.
    """

    base_width: PositiveInt = setting("width that init_std and the learning rate were tuned at", resume="refused")
    base_head_width: PositiveInt | None = setting(
        "head width that they were tuned at; none means this model's", resume="refused", default=None
    )


DepthScaling = Literal["initial", "branch", "none"]
_DEPTH_SCALING = (
    "of what is added to the residual stream: initial divides its initial weights by sqrt(2 layers) (GPT-2), branch "
    "divides its output by sqrt(2 layers) for good, none does neither"
)


class DecoderConfig(ModelConfig):
    """Decoder-only: pre-norm RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    layout: ClassVar[Layout] = "decoder"
    family: Literal["decoder"] = "decoder"
    num_layers: PositiveInt = setting("decoder layers", resume="refused")
    num_kv_heads: PositiveInt | None = setting(
        "G, key/value heads; must divide num_heads; none means num_heads", resume="refused", default=None
    )
    head_width: PositiveInt | None = setting(
        "K, width of a head; none means width / num_heads", resume="refused", default=None
    )
    qk_norm: Flag = setting("RMSNorm on queries and keys per head, before RoPE", resume="refused", default=False)
    positions: Literal["rope", "alibi", "learned"] = setting(
        "rotary angles, a fixed bias by distance (ALiBi), or a learned vector per place",
        resume="refused",
        default="rope",
    )
    max_length: PositiveInt | None = setting(
        "learned positions: the longest document, at least batch.sequence_length; none with other positions",
        resume="refused",
        default=None,
    )
    rope_theta: PositiveReal = setting("base of the rotary frequencies", resume="refused", default=10000.0)
    rope_scaling: RopeScaling | None = setting(
        "scaling of the rotary frequencies for longer sequences; none keeps them", resume="logged", default=None
    )
    norm_eps: PositiveReal = setting("epsilon of RMSNorm", resume="refused", default=1e-5)
    init_std: PositiveReal = setting("standard deviation of the initial weights", resume="refused", default=0.02)
    depth_scaling: DepthScaling = setting(_DEPTH_SCALING, resume="refused", default="initial")
    mup: MuPConfig | None = setting("muP; none is the standard parametrisation", resume="refused", default=None)


PostNormScaling = Literal["none", "deepnorm"]
_POST_NORM_SCALING = (
    "of post-norm layers: deepnorm gives the residual stream a larger share in each sum and starts what is added to it "
    "smaller, so that hundreds of layers train (DeepNet); none as in the paper of the family"
)


class EncoderDecoderConfig(ModelConfig):
    """The 2017 Transformer: post-norm, sinusoidal positions, cross-attention, biases, ReLU."""

    layout: ClassVar[Layout] = "encoder_decoder"
    family: Literal["encoder_decoder"] = "encoder_decoder"
    num_encoder_layers: PositiveInt = setting("encoder layers", resume="refused")
    num_decoder_layers: PositiveInt = setting("decoder layers", resume="refused")
    norm_eps: PositiveReal = setting(
        "epsilon of LayerNorm; the paper names none, 1e-5 is torch's and the only one that Marian computes",
        resume="refused",
        default=1e-5,
    )
    depth_scaling: PostNormScaling = setting(_POST_NORM_SCALING, resume="refused", default="none")


class EncoderConfig(ModelConfig):
    """Encoder-only as BERT: post-norm, learned positions, biases, GELU, a transform before the vocabulary."""

    layout: ClassVar[Layout] = "encoder"
    family: Literal["encoder"] = "encoder"
    num_layers: PositiveInt = setting("encoder layers", resume="refused")
    max_length: PositiveInt = setting(
        "learned positions: the longest document, at least batch.sequence_length", resume="refused"
    )
    norm_eps: PositiveReal = setting("epsilon of LayerNorm", resume="refused", default=1e-12)
    init_std: PositiveReal = setting("standard deviation of the initial weights", resume="refused", default=0.02)
    depth_scaling: PostNormScaling = setting(_POST_NORM_SCALING, resume="refused", default="none")


class GPT2Config(ModelConfig):
    """Decoder-only as GPT-2: pre-norm LayerNorm, learned positions, biases, GELU in its tanh form."""

    layout: ClassVar[Layout] = "decoder"
    family: Literal["gpt2"] = "gpt2"
    num_layers: PositiveInt = setting("decoder layers", resume="refused")
    max_length: PositiveInt = setting(
        "learned positions: the longest document, at least batch.sequence_length", resume="refused"
    )
    norm_eps: PositiveReal = setting("epsilon of LayerNorm", resume="refused", default=1e-5)
    init_std: PositiveReal = setting("standard deviation of the initial weights", resume="refused", default=0.02)
    depth_scaling: DepthScaling = setting(_DEPTH_SCALING, resume="refused", default="initial")
    mup: MuPConfig | None = setting("muP; none is the standard parametrisation", resume="refused", default=None)


class T5Config(ModelConfig):
    """T5: pre-norm RMSNorm, relative biases, no other biases; tied = v1.0 (output scaled), untied as in v1.1."""

    layout: ClassVar[Layout] = "encoder_decoder"
    family: Literal["t5"] = "t5"
    num_encoder_layers: PositiveInt = setting("encoder layers", resume="refused")
    num_decoder_layers: PositiveInt = setting("decoder layers", resume="refused")
    head_width: PositiveInt | None = setting(
        "K, width of a head; none means width / num_heads", resume="refused", default=None
    )
    feed_forward: Literal["relu", "gated_gelu"] = setting(
        "relu as in v1.0, gated_gelu as in v1.1", resume="refused", default="gated_gelu"
    )
    num_buckets: PositiveInt = setting(
        "buckets of the relative bias: an even number of at least 4", resume="refused", default=32
    )
    max_distance: PositiveInt = setting(
        "tokens from which on all distances share the last bucket", resume="refused", default=128
    )
    norm_eps: PositiveReal = setting("epsilon of RMSNorm", resume="refused", default=1e-6)


class GemmaConfig(ModelConfig):
    """Decoder-only as Gemma 2 and 3: norms before and after each block, windows, caps or QK norm, gated GELU."""

    layout: ClassVar[Layout] = "decoder"
    family: Literal["gemma"] = "gemma"
    num_layers: PositiveInt = setting("decoder layers", resume="refused")
    num_kv_heads: PositiveInt | None = setting(
        "G, key/value heads; must divide num_heads; none means num_heads", resume="refused", default=None
    )
    head_width: PositiveInt | None = setting(
        "K, width of a head; none means width / num_heads", resume="refused", default=None
    )
    query_scale: PositiveReal | None = setting(
        "scores are divided by the square root of this; none means head_width", resume="refused", default=None
    )
    qk_norm: Flag = setting("RMSNorm on queries and keys per head, as Gemma 3", resume="refused", default=False)
    attention_softcap: PositiveReal | None = setting(
        "scores become cap * tanh(score / cap): 50 in Gemma 2; none is no cap", resume="refused", default=None
    )
    logit_softcap: PositiveReal | None = setting(
        "logits become cap * tanh(logit / cap): 30 in Gemma 2; none is no cap", resume="refused", default=None
    )
    window: PositiveInt = setting("tokens that a layer with a window sees, its own included", resume="refused")
    full_every: PositiveInt = setting(
        "every so manieth layer has no window: 2 in Gemma 2, 6 in Gemma 3", resume="refused", default=2
    )
    rope_theta: PositiveReal = setting(
        "base of the rotary frequencies of layers without a window", resume="refused", default=10000.0
    )
    window_rope_theta: PositiveReal | None = setting(
        "base of the rotary frequencies of layers with a window; none means rope_theta", resume="refused", default=None
    )
    rope_scaling: RopeScaling | None = setting(
        "scaling of the rotary frequencies of layers without a window", resume="logged", default=None
    )
    norm_eps: PositiveReal = setting("epsilon of RMSNorm", resume="refused", default=1e-6)
    init_std: PositiveReal = setting("standard deviation of the initial weights", resume="refused", default=0.02)


class MoEConfig(ModelConfig):
    """The decoder with a mixture of experts in every layer: Mixtral, with qk_norm Qwen3-MoE."""

    layout: ClassVar[Layout] = "decoder"
    family: Literal["moe"] = "moe"
    num_layers: PositiveInt = setting("decoder layers", resume="refused")
    num_experts: PositiveInt = setting(
        "experts of a layer; feed_forward_width is the hidden width of one of them", resume="refused"
    )
    experts_per_token: PositiveInt = setting("experts that a token passes", resume="refused", default=2)
    normalised_experts: Flag = setting(
        "the weights of a token's experts sum to 1 (Mixtral); off: they are its probabilities",
        resume="refused",
        default=True,
    )
    balance_loss: NonNegativeReal = setting(
        "weight of the loss that spreads tokens over experts; experts_per_token is its best value",
        resume="logged",
        default=0.01,
    )
    router_z_loss: NonNegativeReal = setting(
        "weight of logsumexp^2 of the router's logits", resume="logged", default=0.001
    )
    num_kv_heads: PositiveInt | None = setting(
        "G, key/value heads; must divide num_heads; none means num_heads", resume="refused", default=None
    )
    head_width: PositiveInt | None = setting(
        "K, width of a head; none means width / num_heads", resume="refused", default=None
    )
    qk_norm: Flag = setting("RMSNorm on queries and keys per head, before RoPE", resume="refused", default=False)
    rope_theta: PositiveReal = setting("base of the rotary frequencies", resume="refused", default=10000.0)
    rope_scaling: RopeScaling | None = setting(
        "scaling of the rotary frequencies for longer sequences; none keeps them", resume="logged", default=None
    )
    norm_eps: PositiveReal = setting("epsilon of RMSNorm", resume="refused", default=1e-5)
    init_std: PositiveReal = setting("standard deviation of the initial weights", resume="refused", default=0.02)
    depth_scaling: Literal["initial", "none"] = setting(
        "initial divides the initial weights of what is added to the residual stream by sqrt(2 layers); none does not",
        resume="refused",
        default="initial",
    )


AnyModelConfig = Annotated[
    DecoderConfig | EncoderDecoderConfig | EncoderConfig | GPT2Config | T5Config | GemmaConfig | MoEConfig,
    Field(discriminator="family"),
]
