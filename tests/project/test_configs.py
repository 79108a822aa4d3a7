"""Every config loads, says at its top what it is, and its parameter count is the model's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pretrain.config import load_config
from pretrain.config.schema import (
    DecoderConfig,
    EncoderConfig,
    EncoderDecoderConfig,
    GPT2Config,
    MoEConfig,
    RunConfig,
)
from pretrain.model.registry import build_model

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
NAMES = [str(path.relative_to(ROOT / "configs")) for path in CONFIGS]
TINY = ["quickstart.yaml", *(name for name in NAMES if name.startswith("tests/"))]
BUILT_HERE = [name for name in NAMES if not name.startswith("llama")]


def parameters_by_hand(config: RunConfig) -> int:
    """Counted from the shapes on paper, not from the module."""
    model, width, hidden = config.model, config.model.width, config.model.feed_forward_width
    embedding = model.vocabulary_size * width
    if isinstance(model, DecoderConfig | MoEConfig):
        head = model.head_width or width // model.num_heads
        queries, keys = model.num_heads * head, (model.num_kv_heads or model.num_heads) * head
        layer = width * queries + 2 * width * keys + queries * width  # q, k and v, output
        experts = model.num_experts if isinstance(model, MoEConfig) else 1
        layer += experts * 3 * width * hidden + 2 * width  # SwiGLU, two norms
        layer += experts * width if experts > 1 else 0  # router
        layer += 2 * head if model.qk_norm else 0
        return embedding * (1 if model.tied_embeddings else 2) + model.num_layers * layer + width
    attention = 4 * (width * width + width)
    feed_forward = width * hidden + hidden + hidden * width + width
    norm = 2 * width
    if isinstance(model, EncoderConfig):
        head = width * width + width + norm + model.vocabulary_size  # transform, norm, a bias per entry
        layer = attention + feed_forward + 2 * norm
        return embedding + model.max_length * width + norm + model.num_layers * layer + head
    if isinstance(model, GPT2Config):
        assert model.tied_embeddings
        return embedding + model.max_length * width + model.num_layers * (attention + feed_forward + 2 * norm) + norm
    assert isinstance(model, EncoderDecoderConfig)
    encoder = model.num_encoder_layers * (attention + feed_forward + 2 * norm)
    decoder = model.num_decoder_layers * (2 * attention + feed_forward + 3 * norm)
    assert model.tied_embeddings
    return embedding + encoder + decoder


def comment_of(path: Path) -> str:
    lines = path.read_text().splitlines()
    return "\n".join(lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))])


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Loads a config in a folder where the files that it names exist."""
    monkeypatch.chdir(tmp_path)

    def load_with_files(path: Path) -> RunConfig:
        text = path.read_text() + (ROOT / "configs/llama-1b.yaml").read_text()
        for name in re.findall(r"path: ([\w/.-]+)", text):
            (tmp_path / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / name / "manifest.json").touch()
        for name in re.findall(r"^tokenizer: (\S+)", text, re.MULTILINE):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        return load_config(path)

    return load_with_files


@pytest.mark.parametrize("path", CONFIGS, ids=NAMES)
def test_each_config_loads_under_its_own_name(path: Path, load) -> None:
    assert load(path).name == path.stem


@pytest.mark.parametrize("path", CONFIGS, ids=NAMES)
def test_the_comment_gives_the_command_and_what_to_expect(path: Path) -> None:
    comment = comment_of(path)
    assert re.search(rf"pretrain (train|submit) configs/{re.escape(str(path.relative_to(ROOT / 'configs')))}", comment)
    assert "# Expect:" in comment
    assert "@" not in comment


@pytest.mark.parametrize("path", CONFIGS, ids=NAMES)
def test_the_stated_parameter_count_is_that_of_the_shapes(path: Path, load) -> None:
    stated = re.findall(r"([\d,]+) parameters", comment_of(path))
    assert [int(number.replace(",", "")) for number in stated] == [parameters_by_hand(load(path))]


@pytest.mark.parametrize("name", TINY)
def test_the_model_has_as_many_parameters_as_stated(name: str, load) -> None:
    config = load(ROOT / "configs" / name)
    model = build_model(config.model, config.loss, seed=config.seed)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters_by_hand(config)


@pytest.mark.parametrize(
    ("name", "tokens_per_step", "tokens"),
    [
        ("gpt2-124m.yaml", 0.52e6, 10e9),
        ("llama-1b.yaml", 2.1e6, 25e9),
        ("llama-8b.yaml", 4.2e6, 160e9),
        ("transformer-base-2017.yaml", 24576, 2.46e9),
    ],
)
def test_the_stated_batch_and_length_in_tokens_are_those_of_the_fields(
    name: str, tokens_per_step: float, tokens: float, load
) -> None:
    config = load(ROOT / "configs" / name)
    per_step = config.batch.global_batch_size * config.batch.sequence_length
    assert per_step == pytest.approx(tokens_per_step, rel=0.02)
    assert per_step * config.schedule.total_steps == pytest.approx(tokens, rel=0.03)


def test_an_extending_config_changes_only_what_it_names(load) -> None:
    small, large = load(ROOT / "configs/llama-1b.yaml"), load(ROOT / "configs/llama-8b.yaml")
    assert large.model.vocabulary_size == small.model.vocabulary_size
    assert large.optimizer.weight_decay == small.optimizer.weight_decay
    assert (large.engine.zero_stage, small.engine.zero_stage) == (3, 2)
