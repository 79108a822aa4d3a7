"""The decoder against transformers' Llama and Qwen3: an implementation that nobody here wrote."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pretrain.config.schema import DecoderConfig, LossConfig
from pretrain.errors import UserError
from pretrain.model.hf.directory import export_model, import_model
from pretrain.model.hf.family import ExportOptions
from pretrain.model.registry import build_model
from tests.model.small import decoder_config, lm_batch
from tests.model.their_gradients import assert_gradients_equal

CASES = [(qk_norm, tied) for qk_norm in (False, True) for tied in (False, True)]


def build(config: DecoderConfig) -> torch.nn.Module:
    return build_model(config, LossConfig(), seed=5, activation_checkpointing=False).eval()


@pytest.mark.parametrize(("qk_norm", "tied"), CASES)
def test_an_exported_decoder_gives_the_same_logits_and_gradients_in_transformers(
    tmp_path: Path, qk_norm: bool, tied: bool
) -> None:
    config = decoder_config(qk_norm=qk_norm, tied_embeddings=tied, head_width=16, rope_theta=5e5, init_std=0.2)
    model = build(config)
    export_model(dict(model.named_parameters()), config, tmp_path / "hf", ExportOptions(64))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    assert type(theirs).__name__ == ("Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM")
    batch = lm_batch([24])
    expected = theirs(batch.decoder_ids[None]).logits[0]
    torch.testing.assert_close(model.logits(batch), expected, atol=1e-5 * expected.abs().max().item(), rtol=0)
    assert expected.abs().max() > 0.5  # else agreement would mean nothing
    torch.nn.functional.cross_entropy(expected, batch.labels, reduction="sum").backward()
    model(batch).objective.backward()
    assert_gradients_equal(model, theirs, tmp_path / "gradients")


@pytest.mark.parametrize(("qk_norm", "tied"), CASES)
def test_a_model_saved_by_transformers_gives_the_same_logits_here(tmp_path: Path, qk_norm: bool, tied: bool) -> None:
    kind = transformers.Qwen3Config if qk_norm else transformers.LlamaConfig
    hf_config = kind(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=tied, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(3)
    theirs = transformers.AutoModelForCausalLM.from_config(hf_config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    config, state = import_model(tmp_path / "theirs")
    model = build(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert unexpected == []
    assert missing == (["head.weight"] if tied else [])
    batch = lm_batch([24], vocabulary_size=101)
    with torch.no_grad():
        expected = theirs(batch.decoder_ids[None]).logits[0]
        torch.testing.assert_close(model.logits(batch), expected, atol=1e-5 * expected.abs().max().item(), rtol=0)


def test_export_then_import_gives_equal_weights_and_config(tmp_path: Path) -> None:
    config = decoder_config(qk_norm=True, tied_embeddings=False)
    state = {name: tensor.detach() for name, tensor in build(config).named_parameters()}
    export_model(state, config, tmp_path / "hf", ExportOptions(64))
    back_config, back = import_model(tmp_path / "hf")
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    assert back_config == config.model_copy(update={"head_width": 8, "dropout": 0.0, "attention": "auto"})


def test_an_export_never_overwrites_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    config = decoder_config()
    state = dict(build(config).named_parameters())
    (tmp_path / "hf").mkdir()
    with pytest.raises(UserError, match="exists"):
        export_model(state, config, tmp_path / "hf", ExportOptions(64))
    del state["norm.weight"]
    with pytest.raises(UserError, match=r"lacks norm\.weight"):
        export_model(state, config, tmp_path / "other", ExportOptions(64))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_an_import_names_what_is_wrong(tmp_path: Path) -> None:
    config = decoder_config()
    export_model(dict(build(config).named_parameters()), config, tmp_path / "hf", ExportOptions(64))
    body = json.loads((tmp_path / "hf/config.json").read_text())

    def refuses(change: dict[str, object], pattern: str) -> None:
        (tmp_path / "hf/config.json").write_text(json.dumps(body | change))
        with pytest.raises(UserError, match=pattern):
            import_model(tmp_path / "hf")

    refuses({"model_type": "mamba"}, "model_type=mamba")
    refuses({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters=")
    refuses({"attention_bias": True}, "attention_bias=True")
    refuses({"hidden_size": 64, "head_dim": 8}, "of shape")
    (tmp_path / "hf/config.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        import_model(tmp_path / "hf")
    with pytest.raises(UserError, match=r"config\.json is missing"):
        import_model(tmp_path)


def test_a_truncated_safetensors_file_is_named(tmp_path: Path) -> None:
    config = decoder_config()
    export_model(dict(build(config).named_parameters()), config, tmp_path / "hf", ExportOptions(64))
    file = tmp_path / "hf/model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        import_model(tmp_path / "hf")


def test_an_import_reads_sharded_weights(tmp_path: Path) -> None:
    config = decoder_config()
    export_model(dict(build(config).named_parameters()), config, tmp_path / "hf", ExportOptions(64))
    tensors = load_file(tmp_path / "hf/model.safetensors")
    names = sorted(tensors)
    (tmp_path / "hf/model.safetensors").unlink()
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        save_file({name: tensors[name] for name in part}, tmp_path / f"hf/model-0000{number}-of-00002.safetensors")
    _, state = import_model(tmp_path / "hf")
    assert state.keys() == dict(build(config).named_parameters()).keys()


def test_an_export_reads_one_weight_at_a_time_and_shards_by_size(tmp_path: Path) -> None:
    config = decoder_config(tied_embeddings=False)
    state = {name: tensor.detach() for name, tensor in build(config).named_parameters()}
    lent: list[weakref.ref[torch.Tensor]] = []

    class Reader(Mapping[str, torch.Tensor]):
        """Weights that are copied when they are asked for, as if read from a file."""

        def __getitem__(self, name: str) -> torch.Tensor:
            held = [reference for reference in lent if reference() is not None]
            assert len(held) <= 2, "weights are held while another is read"  # the type hook keeps up to two samples
            copy = state[name].clone()
            lent.append(weakref.ref(copy))
            return copy

        def __iter__(self) -> Iterator[str]:
            return iter(state)

        def __len__(self) -> int:
            return len(state)

    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    export_model(Reader(), config, tmp_path / "hf", ExportOptions(64), shapes=shapes, shard_bytes=20_000)
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert files == [f"model-0000{number}-of-0000{len(files)}.safetensors" for number in range(1, len(files) + 1)]
    assert len(files) > 2
    assert all(path.stat().st_size < 21_500 for path in (tmp_path / "hf").glob("*.safetensors"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert torch.equal(theirs.lm_head.weight, state["head.weight"])
    _, back = import_model(tmp_path / "hf")
    assert all(torch.equal(back[name], state[name]) for name in state)
