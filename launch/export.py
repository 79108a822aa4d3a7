"""`pretrain checkpoint export RUN --out DIR`: a checkpoint's weights as a directory that transformers loads.

Takes a run and a checkpoint → config.json, safetensors (sharded above 5 GB), tokenizer.json and
tokenizer_config.json, which appear together or not at all. The checkpoint is verified and not deleted
meanwhile. One weight at a time is in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.errors import ExitCode, UserError
from pretrain.log import Log

if TYPE_CHECKING:
    from pretrain.data.tokenizer import Tokenizer


def run_export(args: argparse.Namespace) -> int:
    """Handler of `pretrain checkpoint export`."""
    import torch

    from pretrain.checkpoint import newest_checkpoint, open_weights
    from pretrain.config.batches import longest_batch
    from pretrain.data.tokenizer import Tokenizer
    from pretrain.model.hf.directory import export_model
    from pretrain.model.hf.family import ExportOptions
    from pretrain.rundir import RunDirectory

    run = RunDirectory.locate(args.run)
    config, out = run.config(), Path(args.out)
    if out.exists():
        raise UserError(f"--out={out} exists. An export never overwrites. Name another directory or remove it.")
    name = args.checkpoint or newest_checkpoint(run.checkpoints)
    tokenizer = Tokenizer(run.store.get("tokenizer.json"), f"{run.url}/tokenizer.json")
    options = ExportOptions(
        max(longest_batch(config).sequence_length, config.batch.source_length or 0),
        getattr(torch, args.dtype),
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        start_id=tokenizer.start_id if config.model.layout == "encoder_decoder" else None,
    )
    partial = out.with_name(f"{out.name}.export-{os.getpid()}")
    try:
        with open_weights(run.checkpoints, name, "export") as weights:
            export_model(weights, config.model, partial, options, shapes=weights.shapes, shard_bytes=args.shard_bytes)
        (partial / "tokenizer.json").write_bytes(tokenizer.to_bytes())
        (partial / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(tokenizer), indent=2) + "\n")
        partial.rename(out)
    except OSError as error:
        raise UserError(f"--out={out} cannot be written: {error.strerror}. Name another directory.") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    entries = f"{tokenizer.vocabulary_size} tokens in {config.model.vocabulary_size} rows"
    print(f"{name} of {run.name} -> {out} ({args.dtype}, {entries})")
    wandb = config.metrics.wandb
    if wandb.mode != "off" and "export" in wandb.artifacts:
        from pretrain.metrics.wandb_artifacts import send_export

        send_export(config, run, out, Log(), checkpoint=name, dtype=args.dtype)
    return ExitCode.DONE


def _tokenizer_config(tokenizer: Tokenizer) -> dict[str, object]:
    body = json.loads(tokenizer.to_bytes())
    names = {entry["id"]: entry["content"] for entry in body.get("added_tokens", [])}
    special = {"eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    known = {key: names[number] for key, number in special.items() if number in names}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **known}
