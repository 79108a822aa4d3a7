"""Hugging Face directories on disk: config.json and safetensors, written and read without pickle.

Takes full fp32 weights by our names (as a checkpoint gives them) -> a directory that
`transformers` loads by its own `from_pretrained`; and back. The directory appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pretrain.config.schema import AnyModelConfig
from pretrain.errors import UserError
from pretrain.model.hf.bert import BERT
from pretrain.model.hf.family import Exchange, ExportOptions
from pretrain.model.hf.gemma import GEMMA
from pretrain.model.hf.gpt2 import GPT2
from pretrain.model.hf.llama import LLAMA
from pretrain.model.hf.marian import MARIAN
from pretrain.model.hf.moe import MOE
from pretrain.model.hf.shards import SHARD_BYTES, Entry, write_shards
from pretrain.model.hf.t5 import T5
from pretrain.model.hf.weights import Weight, check_shapes, from_hf_state, pieces_of

_BY_FAMILY: dict[str, Exchange] = {
    "decoder": LLAMA,
    "encoder": BERT,
    "gpt2": GPT2,
    "t5": T5,
    "encoder_decoder": MARIAN,
    "gemma": GEMMA,
    "moe": MOE,
}
_BY_MODEL_TYPE: dict[str, Exchange] = {
    "llama": LLAMA,
    "qwen3": LLAMA,
    "bert": BERT,
    "gpt2": GPT2,
    "t5": T5,
    "marian": MARIAN,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "mixtral": MOE,
    "qwen3_moe": MOE,
}


def export_model(
    state: Mapping[str, Tensor],
    config: AnyModelConfig,
    directory: str | Path,
    options: ExportOptions,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes a new directory; the tokenizer's files are the caller's to add.

    Args:
        state: weights by the names of `named_parameters()`; one is read at a time, so it may be read from files.
        shapes: of the weights, where asking `state` for them would read it.

    Raises:
        UserError: the directory exists, the weights are not those of the config, or theirs cannot compute it.
    """
    directory = Path(directory)
    if directory.exists():
        raise UserError(f"{directory} exists. An export never overwrites. Name another directory or remove it.")
    shapes = shapes or {name: tuple(tensor.shape) for name, tensor in state.items()}
    # A tied matrix is one of ours: under whatever other name the caller has it too, it is written once.
    own = {name: shape for name, shape in shapes.items() if not (config.tied_embeddings and name == "head.weight")}
    body, entries = plan_export(state, own, config, options)
    growing = directory.with_name(f"{directory.name}.partial-{os.getpid()}")
    growing.mkdir(parents=True)
    try:
        write_shards(growing, entries, options.dtype, shard_bytes=shard_bytes)
        text = json.dumps(body, indent=2, sort_keys=True)
        (growing / "config.json").write_text(text + "\n", encoding="utf-8")
        growing.rename(directory)
    except BaseException:
        shutil.rmtree(growing, ignore_errors=True)
        raise
    return directory


def plan_export(
    state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], config: AnyModelConfig, options: ExportOptions
) -> tuple[dict[str, Any], list[Entry]]:
    """The body of config.json, and every tensor that they store with the way to make it.

    Raises:
        UserError: the weights are not those of the config, or theirs cannot compute it.
    """
    exchange = _BY_FAMILY[config.family]
    body, weights = exchange.to_config(config, options), exchange.weights(config)
    check_shapes(shapes, {weight.ours: weight.shape for weight in weights}, "the weights")
    entries: dict[str, Entry] = {}
    for weight in weights:
        for name, shape in zip(weight.theirs, weight.their_shapes(), strict=True):
            entries[name] = Entry(name, shape, partial(_make, state.__getitem__, exchange, config, weight, name))
    for name, what in exchange.extras(config).items():
        if isinstance(what, str):
            entries[name] = replace(entries[what], name=name)
        else:
            entries[name] = Entry(name, what, partial(torch.zeros, what))
    return body, list(entries.values())


def _make(
    read: Callable[[str], Tensor], exchange: Exchange, config: AnyModelConfig, weight: Weight, name: str
) -> Tensor:
    return exchange.convert(name, dict(pieces_of(read(weight.ours), weight))[name], config)


def import_model(directory: str | Path) -> tuple[AnyModelConfig, dict[str, Tensor]]:
    """Reads such a directory, sharded or not: the config and fp32 weights by our names.

    Raises:
        UserError: a file is missing or damaged, or the model has parts that ours lack.
    """
    directory = Path(directory)
    body = read_config(directory)
    exchange, config = exchange_of(body), import_config(body)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UserError(f"{directory} holds no *.safetensors. Pickled weights are not read. Convert them first.")
    hf_state: dict[str, Tensor] = {}
    for file in files:
        try:
            hf_state.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is damaged: {error}. Download or export it again.") from None
    hf_state = {name: tensor.to(torch.float32) for name, tensor in hf_state.items()}
    return config, from_hf_state(exchange.before_import(hf_state, config), exchange.weights(config))


def dropout_left_out(body: Mapping[str, Any]) -> list[str]:
    """What a config.json drops in training and no family here does, as `name=value (where)`."""
    nowhere = {
        "activation_dropout": "inside the feed-forward blocks", "encoder_layerdrop": "whole layers",
        "decoder_layerdrop": "whole layers",
    }  # fmt: skip
    found = [f"{name}={body[name]:g} ({where})" for name, where in nowhere.items() if body.get(name)]
    if body.get("model_type") == "t5" and (rate := body.get("dropout_rate", 0.1)):
        found.append(f"dropout_rate={rate:g} (inside the feed-forward blocks; elsewhere it is taken over)")
    if body.get("model_type") == "gpt2" and (rate := body.get("embd_pdrop", 0.1)) != body.get("resid_pdrop", 0.1):
        found.append(f"embd_pdrop={rate:g} (embeddings have the dropout of the sublayers)")
    return found


def read_config(directory: str | Path) -> dict[str, Any]:
    """The body of config.json. Raises UserError where there is none."""
    config_file = Path(directory) / "config.json"
    if not config_file.is_file():
        raise UserError(
            f"{config_file} is missing. An import reads config.json and *.safetensors. Name such a directory."
        )
    try:
        body: dict[str, Any] = json.loads(config_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{config_file} is not JSON: {error}. Download or export it again.") from None
    return body


def exchange_of(body: Mapping[str, Any]) -> Exchange:
    """How the model of a config.json is exchanged. Raises UserError where it cannot be."""
    exchange = _BY_MODEL_TYPE.get(body.get("model_type", ""))
    if exchange is None:
        raise UserError(
            f"model_type={body.get('model_type')} cannot be imported. "
            f"What can be: {', '.join(_BY_MODEL_TYPE)}. Convert it to one of these first."
        )
    return exchange


def import_config(body: Mapping[str, Any]) -> AnyModelConfig:
    """Our config of a config.json. Raises UserError for what ours cannot compute."""
    config: AnyModelConfig = exchange_of(body).from_config(body)
    return config
