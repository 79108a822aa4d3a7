"""muP: activations keep their size at any width; depth scaling: what is added, by hand; learning rates by group."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.config.schema import AdamWConfig, LossConfig, MuPConfig
from pretrain.errors import UserError
from pretrain.model.hf.directory import export_model
from pretrain.model.hf.family import ExportOptions
from pretrain.model.registry import build_model
from pretrain.model.scaling import DeepNorm
from pretrain.optim.groups import parameter_groups
from pretrain.optim.optimizers import build_optimizer
from pretrain.sequence import SeqInfo
from tests.model.small import decoder_config, encoder_config, encoder_decoder_config, gpt2_config, lm_batch

WIDTHS = (32, 64, 128, 256)
FAMILIES = {"decoder": decoder_config, "gpt2": gpt2_config}


def sizes_after_training(family: str, width: int, mup: MuPConfig | None, steps: int = 8) -> dict[str, float]:
    """Root mean square of what each part gives, after some steps of AdamW."""
    config = FAMILIES[family](width=width, num_heads=width // 8, feed_forward_width=4 * width, init_std=0.1, mup=mup,
                              **({"num_kv_heads": None} if family == "decoder" else {}))  # fmt: skip
    model = build_model(config, LossConfig(), seed=1)
    settings = AdamWConfig(learning_rate=1e-2, weight_decay=0.0)
    groups = parameter_groups(model, 0.0)
    for group in groups:
        group["lr"] = settings.learning_rate * group["learning_rate_scale"]
    optimizer = build_optimizer(groups, settings)
    batch = lm_batch((20, 12))
    before = model.logits(batch).detach()
    for _ in range(steps):
        optimizer.zero_grad()
        (model(batch).objective / batch.target_tokens).backward()
        optimizer.step()
    sizes: dict[str, float] = {}

    def note(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: torch.Tensor) -> None:
            sizes[name] = float(output.square().mean().sqrt())

        return hook

    for index, layer in enumerate(model.layers):
        layer.attention.register_forward_hook(note(f"attention {index}"))
        layer.mlp.register_forward_hook(note(f"mlp {index}"))
        layer.register_forward_hook(note(f"layer {index}"))
    with torch.no_grad():
        after = model.logits(batch)
    sizes["change of logits"] = float((after - before).square().mean().sqrt())
    return sizes


def slopes(family: str, mup: MuPConfig | None) -> dict[str, float]:
    """The exponents by which the sizes grow with the width."""
    sizes = [sizes_after_training(family, width, mup) for width in WIDTHS]
    x = torch.tensor(WIDTHS, dtype=torch.float64).log()
    x -= x.mean()
    return {
        name: float((x * torch.tensor([size[name] for size in sizes], dtype=torch.float64).log()).sum() / (x * x).sum())
        for name in sizes[0]
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_coordinates_keep_their_size_with_mup_and_grow_without(family: str) -> None:
    flat, growing = slopes(family, MuPConfig(base_width=WIDTHS[0])), slopes(family, None)
    assert all(abs(slope) < 0.2 for slope in flat.values()), flat
    assert growing["change of logits"] > 0.4, growing
    assert growing["mlp 1"] > 0.4, growing


def spread(module: Any) -> float:
    return float(module.weight.detach().std())


def test_mup_is_nothing_at_the_base_width() -> None:
    plain, base = (
        build_model(decoder_config(mup=mup), LossConfig(), seed=1) for mup in (None, MuPConfig(base_width=32))
    )
    batch = lm_batch((9, 4))
    assert torch.equal(plain.logits(batch), base.logits(batch))
    assert [group["name"] for group in parameter_groups(base, 0.1)] == ["decay", "no_decay"]


def test_mup_of_four_times_the_width_by_hand() -> None:
    config = decoder_config(width=128, head_width=32, mup=MuPConfig(base_width=32, base_head_width=8), norm_eps=1e-12)
    model = build_model(config, LossConfig(), seed=1)
    mlp = model.layers[0].mlp
    assert spread(mlp.gate_up) == pytest.approx(0.02 / math.sqrt(4), rel=0.03)
    assert spread(mlp.down) == pytest.approx(0.02 / math.sqrt(4) / math.sqrt(4), rel=0.05)
    assert spread(model.embedding) == pytest.approx(0.02, rel=0.03)
    assert model.layers[0].attention.scale == pytest.approx(math.sqrt(8) / 32)
    groups = {group["name"]: group for group in parameter_groups(model, 0.1)}
    assert {name: group["learning_rate_scale"] for name, group in groups.items()} == {
        "decay": 1.0, "decay_x0.25": 0.25, "no_decay": 1.0,
    }  # fmt: skip
    assert [id(p) for p in groups["decay"]["params"]] == [id(model.embedding.weight)]
    assert groups["decay_x0.25"]["weight_decay"] == 0.1
    hidden = model.hidden(lm_batch((5,))).detach()
    assert float(hidden.square().mean().sqrt()) == pytest.approx(0.25, rel=1e-3)  # the norm's 1, divided by m


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("depth_scaling", "std", "share"), [("initial", 0.1, 1.0), ("branch", 0.2, 0.5), ("none", 0.2, 1.0)]
)
def test_depth_scaling_by_hand(family: str, depth_scaling: str, std: float, share: float) -> None:
    """Two layers: sqrt(2 * 2) = 2."""
    model = build_model(FAMILIES[family](depth_scaling=depth_scaling, init_std=0.2), LossConfig(), seed=1)
    layer, batch = model.layers[1], lm_batch((9,))
    assert spread(layer.attention.output) == pytest.approx(std, rel=0.1)
    parts: dict[str, torch.Tensor] = {}
    layer.register_forward_pre_hook(lambda module, inputs: parts.update(before=inputs[0]))
    layer.attention.register_forward_hook(lambda module, inputs, output: parts.update(attention=output))
    layer.mlp.register_forward_hook(lambda module, inputs, output: parts.update(mlp=output))
    layer.register_forward_hook(lambda module, inputs, output: parts.update(after=output))
    model.logits(batch)
    expected = parts["before"] + share * (parts["attention"] + parts["mlp"])
    torch.testing.assert_close(parts["after"], expected, atol=1e-5, rtol=1e-5)


DEEP = {
    "encoder": encoder_config(num_layers=12, depth_scaling="deepnorm", init_std=0.2),
    "encoder_decoder": encoder_decoder_config(num_encoder_layers=3, num_decoder_layers=5, depth_scaling="deepnorm"),
}


def test_deepnorm_has_the_factors_of_its_paper() -> None:
    """BERT with 12 layers, and the published table's example of 6 and 6."""
    bert = DeepNorm.of(DEEP["encoder"])
    assert (bert.keep, bert.gain) == (pytest.approx(24**0.25), pytest.approx(96**-0.25))
    six = encoder_decoder_config(num_encoder_layers=6, num_decoder_layers=6, depth_scaling="deepnorm")
    encoder, decoder = DeepNorm.of(six), DeepNorm.of(six, decoder=True)
    assert (encoder.keep, encoder.gain) == (pytest.approx(1.4179, abs=1e-4), pytest.approx(0.4970, abs=1e-4))
    assert (decoder.keep, decoder.gain) == (pytest.approx(2.0598, abs=1e-4), pytest.approx(0.3433, abs=1e-4))
    assert DeepNorm.of(encoder_decoder_config()) == DeepNorm(1.0, 1.0)


def shares_of(mine: torch.nn.Module, theirs: torch.nn.Module) -> list[float]:
    """Spread of each of the stacked matrices against that of the other model."""
    parts = mine.weight.shape[0] // 32
    pairs = zip(mine.weight.detach().chunk(parts), theirs.weight.detach().chunk(parts), strict=True)
    return [float(a.std() / b.std()) for a, b in pairs]


def test_deepnorm_starts_values_outputs_and_feed_forward_smaller_and_not_queries_and_keys() -> None:
    for name, config in DEEP.items():
        plain = config.model_copy(update={"depth_scaling": "none"})
        deep, usual = (build_model(each, LossConfig(), seed=1) for each in (config, plain))
        stacks = [(deep.layers[0], usual.layers[0], DeepNorm.of(config, decoder=name != "encoder").gain)]
        if name == "encoder_decoder":
            stacks.append((deep.encoder.layers[0], usual.encoder.layers[0], DeepNorm.of(config).gain))
        for layer, other, gain in stacks:
            assert shares_of(layer.attention.qkv, other.attention.qkv) == pytest.approx([1.0, 1.0, gain], rel=0.1)
            if hasattr(layer, "cross"):
                assert shares_of(layer.cross.key_value, other.cross.key_value) == pytest.approx([1.0, gain], rel=0.1)
                assert spread(layer.cross.query) == spread(other.cross.query)
            for part in ("attention.output", "mlp.inner", "mlp.outer"):
                share = spread(layer.get_submodule(part)) / spread(other.get_submodule(part))
                assert share == pytest.approx(gain, rel=0.1), part


def test_a_deepnorm_layer_keeps_its_share_of_the_stream() -> None:
    model = build_model(DEEP["encoder"], LossConfig(), seed=1).eval()
    layer, info = model.layers[3], SeqInfo.from_lengths([5, 4])
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(0))
    first = layer.attention_norm(24**0.25 * x + layer.attention(x, info, 0))
    expected = layer.mlp_norm(24**0.25 * first + layer.mlp(first))
    torch.testing.assert_close(layer(x, info, 0), expected)


@pytest.mark.parametrize("name", DEEP)
def test_deepnorm_cannot_be_said_to_transformers(name: str, tmp_path: Path) -> None:
    model = build_model(DEEP[name], LossConfig(), seed=1)
    with pytest.raises(UserError, match=r"model\.depth_scaling=deepnorm cannot be exported"):
        export_model(dict(model.named_parameters()), DEEP[name], tmp_path / "hf", ExportOptions(32))
