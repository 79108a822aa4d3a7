"""Rows of published training reports: shape, machine and layout, and the tokens per second and GPU that were reached.

Tables: MosaicML's llm-foundry, `scripts/train/benchmarking/README.md` (GPT-style models, fully sharded data parallel,
bf16, one to eight nodes), read in 2026. The rates of `launch.plan.machines` are fitted to its even rows; only the odd
ones and the reports below count as met or missed. Reports: the papers and pages that each row names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launch.plan.machines import ACCELERATORS
from launch.plan.speed import speed_of
from pretrain.config import RunConfig, config_from_dict

# Width, layers, heads; four times the width inside, a vocabulary of 50,368, learned positions.
_MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
# Model, tokens per row, GPUs, rows of a micro-batch, tokens/s/GPU, activations computed again.
_TABLES = {
    "H100": """
70b 2048 64 8 1039 1
70b 2048 32 2 882 1
30b 8192 8 1 1384 1
30b 4096 8 1 1802 1
30b 2048 32 14 2308 1
30b 2048 16 10 2263 1
30b 2048 8 3 2002 1
30b 1024 8 6 2084 1
13b 32768 8 1 1976 1
13b 16384 8 3 2985 1
13b 4096 8 10 4717 1
13b 2048 64 2 4800 0
13b 2048 32 2 4811 0
13b 2048 16 2 4767 0
13b 2048 8 2 4792 0
13b 1024 8 40 5502 1
7b 65536 8 1 1956 1
7b 32768 8 2 3318 1
7b 8192 8 8 6935 1
7b 4096 8 16 8611 1
7b 2048 8 6 10643 0
7b 1024 8 64 10203 1
3b 65536 8 1 3262 1
3b 32768 8 3 5873 1
3b 16384 8 1 11152 0
3b 8192 8 3 16578 0
3b 4096 8 5 20964 0
3b 2048 64 6 22525 0
3b 2048 32 6 23021 0
3b 2048 16 10 24142 0
3b 1024 8 20 27046 0
3b 512 8 40 27965 0
1b 65536 8 1 5506 1
1b 32768 8 1 12025 0
1b 16384 8 2 19649 0
1b 8192 8 3 29157 0
1b 4096 8 7 38535 0
1b 2048 64 20 44402 0
1b 2048 8 14 45455 0
1b 1024 8 18 48910 0
760m 32768 8 1 16291 0
760m 16384 8 3 27815 0
760m 8192 8 6 41825 0
760m 4096 8 12 55459 0
760m 2048 8 24 63147 0
760m 1024 8 48 78581 0
""",
    "A100-80GB": """
70b 2048 64 8 410 1
70b 2048 32 2 373 1
30b 8192 8 1 574 1
30b 4096 8 1 814 1
30b 2048 8 3 916 1
30b 1024 8 6 946 1
13b 32768 8 1 1016 1
13b 16384 8 3 1431 1
13b 8192 8 5 1795 1
13b 4096 8 10 2060 1
13b 2048 8 2 2262 0
13b 1024 8 40 2330 1
7b 65536 8 1 1013 1
7b 32768 8 2 1672 1
7b 16384 8 4 2453 1
7b 8192 8 8 3206 1
7b 4096 8 16 3684 1
7b 2048 8 6 4641 0
7b 1024 8 64 4357 1
3b 65536 8 1 1767 1
3b 32768 8 3 3029 1
3b 16384 8 1 5529 0
3b 8192 8 3 7695 0
3b 4096 8 5 9457 0
3b 2048 8 10 10811 0
3b 1024 8 20 11580 0
1b 65536 8 1 3044 1
1b 32768 8 1 6275 0
1b 16384 8 2 9956 0
1b 8192 8 3 13814 0
1b 4096 8 7 17807 0
1b 2048 8 14 20513 0
1b 1024 8 18 22112 0
760m 32768 8 1 8802 0
760m 8192 8 6 20933 0
760m 2048 8 24 32434 0
350m 8192 8 8 36569 0
350m 2048 8 32 58782 0
125m 8192 8 8 90392 0
125m 2048 8 40 142830 0
""",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One published measurement."""

    source: str
    accelerator: str
    gpus: int
    config: RunConfig
    tokens_per_second_per_gpu: float

    def predicted(self) -> float:
        """What the planner says."""
        machine = ACCELERATORS[self.accelerator]
        return speed_of(self.config, self.gpus, machine).tokens_per_second_per_gpu

    def error(self) -> float:
        """Relative, positive where the planner is too fast."""
        return self.predicted() / self.tokens_per_second_per_gpu - 1.0


def within(row: Row, tolerance: float) -> bool:
    """Whether the planner meets a row."""
    return abs(row.error()) <= tolerance


def _config(model: dict[str, Any], length: int, gpus: int, rows: int, recomputed: bool, stage: int = 3) -> RunConfig:
    return config_from_dict(
        {
            "name": "published",
            "seed": 1,
            "tokenizer": "none",
            "data": {"sources": {"none": {"path": "none"}}},
            "model": model,
            "batch": {"global_batch_size": rows * gpus, "micro_batch_size": rows, "sequence_length": length},
            "optimizer": {"kind": "adamw", "learning_rate": 1e-3},
            "schedule": {"kind": "constant", "total_steps": 1},
            "engine": {"zero_stage": stage, "activation_checkpointing": recomputed},
            "checkpoint": {"every_steps": 1},
            "cluster": {"device": "cuda"},
        }
    )


def _mpt(name: str, length: int) -> dict[str, Any]:
    width, layers, heads = _MPT[name]
    shape = {"vocabulary_size": 50368, "width": width, "num_layers": layers, "num_heads": heads}
    return {"family": "gpt2", **shape, "feed_forward_width": 4 * width, "max_length": length}


def _llama(width: int, layers: int, heads: int, hidden: int, keys: int, vocabulary: int = 32000) -> dict[str, Any]:
    shape = {"vocabulary_size": vocabulary, "width": width, "num_layers": layers, "num_heads": heads}
    return {"family": "decoder", **shape, "num_kv_heads": keys, "feed_forward_width": hidden, "tied_embeddings": False}


def table_rows(accelerator: str) -> list[Row]:
    """All rows of a table, in its order."""
    rows = []
    for line in _TABLES[accelerator].split("\n"):
        if line:
            name, *numbers = line.split()
            length, gpus, micro, speed, recomputed = map(int, numbers)
            config = _config(_mpt(name, length), length, gpus, micro, bool(recomputed))
            rows.append(Row(f"llm-foundry {name} {length} x{gpus}", accelerator, gpus, config, float(speed)))
    return rows


def _reports() -> list[Row]:
    """Single runs of other groups; speeds as stated, or tokens over GPU time as stated."""
    gpt3 = {**_mpt("70b", 2048), "width": 12288, "num_layers": 96, "num_heads": 96, "feed_forward_width": 49152}
    gpt2 = {**_mpt("125m", 1024), "vocabulary_size": 50304}
    cases: list[tuple[str, str, int, dict[str, Any], int, int, bool, float]] = [
        # Touvron et al. 2023, section 2.4: "around 380 tokens/sec/GPU on 2048 A100 GPU with 80GB".
        ("LLaMA 65B", "A100-80GB", 2048, _llama(8192, 80, 64, 22016, 64), 2048, 1, False, 380.0),
        # Touvron et al. 2023 (Llama 2), table 2: GPU hours for 2.0 T tokens of 4,096.
        ("Llama 2 7B", "A100-80GB", 1024, _llama(4096, 32, 32, 11008, 32), 4096, 1, False, 2e12 / 184320 / 3600),
        ("Llama 2 13B", "A100-80GB", 1024, _llama(5120, 40, 40, 13824, 40), 4096, 1, False, 2e12 / 368640 / 3600),
        ("Llama 2 70B", "A100-80GB", 1024, _llama(8192, 80, 64, 28672, 8), 4096, 1, False, 2e12 / 1720320 / 3600),
        # Narayanan et al. 2021, section 5.1: 300 G tokens of GPT-3 in 34 days on 1,024 A100, recomputing.
        ("Megatron GPT-3 175B", "A100-80GB", 1024, gpt3, 2048, 1, True, 300e9 / (34 * 86400 * 1024)),
        # MPT-7B's announcement (2023): 1 T tokens in 9.5 days on 440 A100 of 40 GB.
        ("MPT-7B", "A100-40GB", 440, _mpt("7b", 2048), 2048, 4, True, 1e12 / (9.5 * 86400 * 440)),
        # TinyLlama's page: 24 k tokens/s on an A100 of 40 GB, 16 of them.
        ("TinyLlama 1.1B", "A100-40GB", 16, _llama(2048, 22, 32, 5632, 4), 2048, 8, False, 24000.0),
        # nanoGPT's page: 600 k iterations of 491,520 tokens "in about 4 days" on 8 A100 of 40 GB.
        ("nanoGPT 124M", "A100-40GB", 8, gpt2, 1024, 12, False, 600e3 * 491520 / (4 * 86400 * 8)),
        # Dubey et al. 2024, table 4: 400 TFLOP/s a GPU on 16,384 H100, rows of 8,192; 6 N + attention a token.
        ("Llama 3 405B", "H100", 16384, _llama(16384, 126, 128, 53248, 8, 128256), 8192, 1, False, 400e12 / 2.53e12),
    ]
    return [
        Row(source, accelerator, gpus, _config(model, length, gpus, rows, recomputed, 2), speed)
        for source, accelerator, gpus, model, length, rows, recomputed, speed in cases
    ]


ROWS: list[Row] = [row for name in _TABLES for row in table_rows(name)[1::2]] + _reports()
