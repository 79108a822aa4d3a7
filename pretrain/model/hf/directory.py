"""Hugging Face directories on disk: config.json and model.safetensors, written and read without pickle.

Takes full fp32 weights by our names (as a checkpoint gives them) -> a directory that
`AutoModelForCausalLM.from_pretrained` loads; and back. The directory appears whole or not at all.
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

from pretrain.config.schema import DecoderConfig
from pretrain.errors import UserError
from pretrain.model.hf.mapping import from_hf_config, from_hf_state, to_hf_config, to_hf_state


def export_decoder(
    state: Mapping[str, Tensor],
    config: DecoderConfig,
    directory: str | Path,
    *,
    max_length: int,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Writes a new directory; the tokenizer's files are the caller's to add.

    Args:
        state: weights by the names of `named_parameters()`.
        max_length: sequence length of the training.
        dtype: of the written tensors.

    Raises:
        UserError: the directory exists, or the weights are not those of the config.
    """
    directory = Path(directory)
    if directory.exists():
        raise UserError(f"{directory} exists. An export never overwrites. Name another directory or remove it.")
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in to_hf_state(state, config).items()}
    partial = directory.with_name(f"{directory.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        text = json.dumps(to_hf_config(config, max_length, dtype), indent=2, sort_keys=True)
        (partial / "config.json").write_text(text + "\n", encoding="utf-8")
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return directory


def import_decoder(directory: str | Path) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """Reads a Llama or Qwen3 directory, sharded or not: the config and fp32 weights by our names.

    Raises:
        UserError: a file is missing or damaged, or the model has parts that the decoder lacks.
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
    config = from_hf_config(body)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UserError(f"{directory} holds no *.safetensors. Pickled weights are not read. Convert them first.")
    hf_state: dict[str, Tensor] = {}
    for file in files:
        try:
            hf_state.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is damaged: {error}. Download or export it again.") from None
    return config, {name: tensor.to(torch.float32) for name, tensor in from_hf_state(hf_state, config).items()}
