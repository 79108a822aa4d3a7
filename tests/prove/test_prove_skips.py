"""A proof of a run that jumps over rows: one block of nonsense in text that has become easy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pretrain.config import load_config
from pretrain.data.loader import open_loader
from pretrain.data.segments import order_of
from pretrain.data.tokenizer import train_bpe
from pretrain.topology import World
from tests.data_read.corpus import VOCABULARY, write_tokens

CONFIG = Path(__file__).parents[2] / "configs/tests/tiny-decoder.yaml"
BLOCKS, BLOCK_TOKENS, ROWS, STEPS, BAD_STEP = 96, 256, 8, 80, 62
EASY = [*range(10, 41), 0]  # 31 tokens and the end, again and again


def _write(folder: Path, tokenizer: Path, bad_block: int | None) -> None:
    documents = [EASY] * (BLOCKS * BLOCK_TOKENS // len(EASY))
    if bad_block is not None:
        draw, each = np.random.default_rng(1), BLOCK_TOKENS // len(EASY)
        for number in range(bad_block * each, (bad_block + 1) * each):
            documents[number] = [*draw.integers(45, VOCABULARY, len(EASY) - 1).tolist(), 0]
    write_tokens(folder, documents, tokenizer, block_tokens=BLOCK_TOKENS, shard_blocks=16)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_jumps_over_a_block_of_nonsense_is_proved_like_any_other(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    train_bpe([Path(__file__).read_text()], 300).save(tokenizer)
    # One lane and one block to a window: a step is a block. Which one the bad step reads is asked of a clean source.
    overrides = [
        f"tokenizer={tokenizer}", f"schedule.total_steps={STEPS}", f"batch.global_batch_size={ROWS}", "data.lanes=1",
        "data.window_blocks=1", "model.dropout=0", "checkpoint.every_steps=10", "checkpoint.keep_last=3",
        "health.spike_z_score=20", "health.spike_window_steps=16", "health.max_rollbacks=3",
        "schedule.warmup_steps=5",
    ]  # fmt: skip
    _write(tmp_path / "clean", tokenizer, None)
    config = load_config(CONFIG, [*overrides, f"data.sources.text.path={tmp_path / 'clean'}"])
    with open_loader(config, np.ones(VOCABULARY, dtype=np.int32), World()) as loader:
        state = loader.initial_state()
        (address,) = order_of(state.segments, state.seed).locate_rows(np.array([BAD_STEP * ROWS]))
    _write(tmp_path / "text", tokenizer, int(address.block))
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", "prove", str(CONFIG), *overrides,
         f"data.sources.text.path={tmp_path / 'text'}", "--kills=2", "--seed=3", "--json", "--keep"],
        env={**os.environ, "PRETRAIN_HOME": str(tmp_path / "runs")}, capture_output=True, text=True, timeout=880,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    proof = json.loads(done.stdout)
    assert proof["equal"]
    assert proof["rows_jumped_over"] == [[BAD_STEP * ROWS, (BAD_STEP + 1) * ROWS]]
    assert len(proof["kills"]) == 2
