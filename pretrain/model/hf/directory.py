"""Hugging Face directories on disk: config.json and model.safetensors, written and read without pickle.

Takes full fp32 weights by our names (as a checkpoint gives them) -> a directory that
`transformers` loads by its own `from_pretrained`; and back. The directory appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pretrain.config.schema import AnyModelConfig
from pretrain.errors import UserError
from pretrain.model.hf.bert import BERT
from pretrain.model.hf.family import Exchange, ExportOptions
from pretrain.model.hf.gpt2 import GPT2
from pretrain.model.hf.llama import LLAMA
from pretrain.model.hf.marian import MARIAN
from pretrain.model.hf.t5 import T5
from pretrain.model.hf.weights import from_hf_state, to_hf_state

_BY_FAMILY: dict[str, Exchange] = {
    "decoder": LLAMA,
    "encoder": BERT,
    "gpt2": GPT2,
    "t5": T5,
    "encoder_decoder": MARIAN,
}
_BY_MODEL_TYPE: dict[str, Exchange] = {
    "llama": LLAMA,
    "qwen3": LLAMA,
    "bert": BERT,
    "gpt2": GPT2,
    "t5": T5,
    "marian": MARIAN,
}


def export_model(
    state: Mapping[str, Tensor], config: AnyModelConfig, directory: str | Path, options: ExportOptions
) -> Path:
    """Writes a new directory; the tokenizer's files are the caller's to add.

    Args:
        state: weights by the names of `named_parameters()`.

    Raises:
        UserError: the directory exists, the weights are not those of the config, or theirs cannot compute it.
    """
    exchange = _BY_FAMILY[config.family]
    directory = Path(directory)
    if directory.exists():
        raise UserError(f"{directory} exists. An export never overwrites. Name another directory or remove it.")
    body = exchange.to_config(config, options)
    # A tied matrix is one of ours: under whatever other name the caller has it too, it is written once.
    own = {name: tensor for name, tensor in state.items() if not (config.tied_embeddings and name == "head.weight")}
    hf_state = exchange.after_export(to_hf_state(own, exchange.weights(config)), config)
    tensors = {name: tensor.to(options.dtype).contiguous() for name, tensor in hf_state.items()}
    partial = directory.with_name(f"{directory.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        text = json.dumps(body, indent=2, sort_keys=True)
        (partial / "config.json").write_text(text + "\n", encoding="utf-8")
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return directory


def import_model(directory: str | Path) -> tuple[AnyModelConfig, dict[str, Tensor]]:
    """Reads such a directory, sharded or not: the config and fp32 weights by our names.

    Raises:
        UserError: a file is missing or damaged, or the model has parts that ours lack.
    """
    directory = Path(directory)
    config_file = directory / "config.json"
    if not config_file.is_file():
        raise UserError(
            f"{config_file} is missing. An import reads config.json and *.safetensors. Name such a directory."
        )
    try:
        body = json.loads(config_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{config_file} is not JSON: {error}. Download or export it again.") from None
    exchange = _BY_MODEL_TYPE.get(body.get("model_type"))
    if exchange is None:
        raise UserError(
            f"model_type={body.get('model_type')} cannot be imported. "
            f"What can be: {', '.join(_BY_MODEL_TYPE)}. Convert it to one of these first."
        )
    config = exchange.from_config(body)
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
