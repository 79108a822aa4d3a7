"""`pretrain checkpoint export RUN --out DIR`, and `average`: weights as a directory that transformers loads.

Takes a run and checkpoints → config.json, safetensors (sharded above 5 GB), tokenizer.json,
tokenizer_config.json, origin.json (which checkpoints they are or are the mean of), objective.json (what they were
trained by, so that `pretrain` asks them as it asks the run; transformers does not read it) and, where the model has
rows that no token has, generation_config.json, which keeps them from being written. All appear together or not at all.
Checkpoints are verified as they are read, and not deleted meanwhile. One weight at a time is in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pretrain.errors import ExitCode, UserError
from pretrain.log import Log

if TYPE_CHECKING:
    from pretrain.data.tokenizer import Tokenizer
    from pretrain.store import Store


OBJECTIVE_FILE = "objective.json"


def run_export(args: argparse.Namespace) -> int:
    """Handler of `pretrain checkpoint export`."""
    from pretrain.checkpoint import newest_checkpoint

    return _write(args, lambda store: [args.checkpoint or newest_checkpoint(store)])


def run_average(args: argparse.Namespace) -> int:
    """Handler of `pretrain checkpoint average`."""
    from pretrain.checkpoint import last_checkpoints

    return _write(args, lambda store: last_checkpoints(store, args.last))


def _write(args: argparse.Namespace, choose: Callable[[Store], list[str]]) -> int:
    """Writes the mean of the chosen checkpoints, which of one is itself."""
    import torch

    from pretrain.checkpoint import open_mean
    from pretrain.config.batches import longest_batch
    from pretrain.data.tokenizer import Tokenizer
    from pretrain.model.hf.directory import export_model
    from pretrain.model.hf.family import ExportOptions
    from pretrain.rundir import RunDirectory

    run = RunDirectory.locate(args.run)
    config, out = run.config(), Path(args.out)
    if out.exists():
        raise UserError(f"--out={out} exists. An export never overwrites. Name another directory or remove it.")
    names = choose(run.checkpoints)
    tokenizer = Tokenizer(run.store.get("tokenizer.json"), f"{run.url}/tokenizer.json")
    options = ExportOptions(
        max(longest_batch(config).sequence_length, config.batch.source_length or 0),
        getattr(torch, args.dtype),
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        start_id=tokenizer.start_id if config.model.layout == "encoder_decoder" else None,
    )
    unused = range(tokenizer.vocabulary_size, config.model.vocabulary_size)
    partial = out.with_name(f"{out.name}.export-{os.getpid()}")
    try:
        with open_mean(run.checkpoints, names, "export") as weights:
            export_model(weights, config.model, partial, options, shapes=weights.shapes, shard_bytes=args.shard_bytes)
            origin = {"run": run.url, "mean_of": [{"checkpoint": p.name, "save_id": p.save_id} for p in weights.parts]}
        (partial / "tokenizer.json").write_bytes(tokenizer.to_bytes())
        _write_json(partial / "tokenizer_config.json", _tokenizer_config(tokenizer))
        _write_json(partial / "origin.json", origin)
        _write_json(partial / OBJECTIVE_FILE, config.objective.model_dump())
        if unused and config.model.layout != "encoder":
            _write_json(partial / "generation_config.json", _generation_config(partial, unused))
        partial.rename(out)
    except OSError as error:
        raise UserError(f"--out={out} cannot be written: {error.strerror}. Name another directory.") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    entries = f"{tokenizer.vocabulary_size} tokens in {config.model.vocabulary_size} rows"
    entries += ", of which those beyond the tokens are never generated" if unused else ""
    which = names[0] if len(names) == 1 else f"the mean of {', '.join(names)}"
    print(f"{which} of {run.name} -> {out} ({args.dtype}, {entries})")
    wandb = config.metrics.wandb
    if wandb.mode != "off" and "export" in wandb.artifacts:
        from pretrain.metrics.wandb_artifacts import send_export

        send_export(config, run, out, Log(), checkpoint=which, dtype=args.dtype)
    return ExitCode.DONE


def _write_json(path: Path, body: Mapping[str, object]) -> None:
    path.write_text(json.dumps(body, indent=2) + "\n")


def _tokenizer_config(tokenizer: Tokenizer) -> dict[str, object]:
    body = json.loads(tokenizer.to_bytes())
    names = {entry["id"]: entry["content"] for entry in body.get("added_tokens", [])}
    special = {"eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    known = {key: names[number] for key, number in special.items() if number in names}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **known}


def _generation_config(directory: Path, unused: range) -> dict[str, object]:
    """What transformers generates by: the ids of config.json, and no row that the tokenizer has no token for."""
    body = json.loads((directory / "config.json").read_text())
    ids = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    return {name: body[name] for name in ids if name in body} | {"suppress_tokens": list(unused)}
