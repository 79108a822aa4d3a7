"""A run directory as metrics see it, and a config, without the rooms that make real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pretrain.config.schema import RunConfig
from pretrain.store import Store, open_store


class Home:
    """Store, name and the layout of metrics files."""

    def __init__(self, store: Store | str | Path, name: str = "run") -> None:
        self.store = open_store(store) if isinstance(store, str | Path) else store
        self.name = name
        self.checkpoints = self.store.child("checkpoints")

    def metrics_key(self, attempt: int) -> str:
        return f"metrics/attempt-{attempt:03d}.jsonl"


def run_config(wandb: str | dict[str, Any] = "off", **metrics: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "a-run",
            "seed": 1,
            "tokenizer": "tokenizer.json",
            "data": {"sources": {"prose": {"path": "somewhere"}}},
            "model": {
                "family": "decoder",
                "vocabulary_size": 300,
                "width": 32,
                "num_heads": 2,
                "feed_forward_width": 64,
                "num_layers": 2,
            },
            "batch": {"global_batch_size": 4, "micro_batch_size": 2, "sequence_length": 32},
            "optimizer": {"kind": "adamw", "learning_rate": 1e-3},
            "schedule": {"kind": "constant", "total_steps": 10},
            "checkpoint": {"every_steps": 5},
            "metrics": {
                "wandb": {"project": "tests", **(wandb if isinstance(wandb, dict) else {"mode": wandb})},
                **metrics,
            },
        }
    )
