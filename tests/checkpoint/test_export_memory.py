"""Memory beside the state: an export holds one weight at a time, a save one copy, a restore a few pieces.

Peaks are VmHWM: ru_maxrss also holds the memory of the process that started a program, from before its exec.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.machine import NOTHING_KEPT, memory_kib
from pretrain.checkpoint import open_weights, restore, save
from pretrain.config.schema import DecoderConfig, LossConfig
from pretrain.model.hf.directory import export_model
from pretrain.model.hf.family import ExportOptions
from pretrain.model.registry import build_model
from pretrain.store import open_store
from pretrain.topology import World
from tests.checkpoint.flips import Plain

ROOT = Path(__file__).resolve().parents[2]
MODEL = DecoderConfig(
    family="decoder", vocabulary_size=2048, width=512, num_layers=8, num_heads=8, num_kv_heads=8,
    feed_forward_width=2048,
)  # fmt: skip
PIECE_MB = 8  # what is read and checked at once
STATE = {"weight": (8_000_000,)}


def shapes() -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = build_model(MODEL, LossConfig(), seed=0, initial=False)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def export(folder: str) -> None:
    """Exports in this process and prints by how many MB its memory has grown at most."""
    store = open_store(Path(folder) / "checkpoints")
    (name,) = store.names()
    warm = torch.ones(2**20)
    before = memory_kib("VmHWM")
    with open_weights(store, name, "test") as weights:
        options = ExportOptions(64, torch.bfloat16)
        export_model(weights, MODEL, Path(folder) / "out", options, shapes=weights.shapes, shard_bytes=2**24)
    after = memory_kib("VmHWM")
    print(json.dumps((after - before) / 1024 * warm[0].item()))


def save_and_restore(folder: str) -> None:
    """Saves twice and restores once in this process; prints by how many MB its memory has grown at most after each."""
    store, source, other = open_store(folder), Plain(1, shapes=STATE), Plain(2, shapes=STATE)
    before, grown = memory_kib("VmHWM"), []
    for step in (1, 2):
        save(store, source, step=step, attempt=1, training_state={}, world=World(), guard=lambda: None).wait()
        grown.append(memory_kib("VmHWM") - before)
    assert restore(store, other, World()) is not None
    grown.append(memory_kib("VmHWM") - before)
    print(json.dumps([size / 1024 for size in grown]))


def run(call: str) -> str:
    program = f"from tests.checkpoint import test_export_memory as here; here.{call}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | NOTHING_KEPT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_save_needs_memory_for_one_copy_of_the_state_and_a_restore_for_pieces(tmp_path: Path) -> None:
    state_mb = 2 * 4 * 8_000_000 / 2**20
    first, second, restored = json.loads(run(f"save_and_restore({str(tmp_path)!r})"))
    assert 0.9 * state_mb < first < 1.05 * state_mb + 12
    assert second - first < 12
    assert restored - second < 4 * PIECE_MB + 12


def test_an_export_needs_memory_for_one_weight_whatever_the_size_of_the_model(tmp_path: Path) -> None:
    sizes = {name: torch.Size(shape).numel() * 4 / 2**20 for name, shape in shapes().items()}
    whole_mb, largest_mb = sum(sizes.values()), max(sizes.values())
    assert whole_mb > 12 * largest_mb
    source = Plain(1, shapes=shapes())
    save(
        open_store(tmp_path / "checkpoints"), source, step=1, attempt=1, training_state={}, world=World(),
        guard=lambda: None,
    ).wait()  # fmt: skip
    grown_mb = float(run(f"export({str(tmp_path)!r})"))
    # A weight in fp32, its bf16 copy and that one's bytes; pieces of the file twice; what the interpreter takes.
    assert grown_mb < 3 * largest_mb + 2 * PIECE_MB + 12, f"{grown_mb:.0f} of {whole_mb:.0f} MB"
    assert len(list((tmp_path / "out").glob("*.safetensors"))) >= 3
