"""Prelude of ranks that wait a second for a wandb server instead of fifteen."""

from __future__ import annotations

from pretrain.metrics.wandb_sink import WandbSink


def install() -> None:
    assert WandbSink.__init__.__kwdefaults__ is not None
    WandbSink.__init__.__kwdefaults__["init_timeout_s"] = 1.0
