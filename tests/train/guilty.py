"""Rows that spoil a step: a prelude for rank processes that multiplies the loss of chosen micro-batches.

takes → the variable GUILTY, JSON {digest of a micro-batch: factor}, and GUILTY_ONCE, a file that is made when the
first of them is spoilt, after which none is (a fault of the hardware). SKIP, JSON [first row, end row], begins the
data stream with those rows jumped over, which is what a run should come to that met them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pretrain.config import load_config
from pretrain.data.loader import Loader, open_loader
from pretrain.data.state import DataState
from pretrain.data.tokenizer import Tokenizer
from pretrain.loss.sums import LossSums
from pretrain.model.decoder import Decoder
from pretrain.topology import World


def install() -> None:
    """Spoils the decoder's loss and the loader's start as the environment says."""
    guilty: dict[str, float] = {k: float(v) for k, v in json.loads(os.environ.get("GUILTY", "{}")).items()}
    once, forward = os.environ.get("GUILTY_ONCE"), Decoder.forward

    def spoilt(self: Decoder, batch: Any) -> LossSums:
        sums = forward(self, batch)
        factor = guilty.get(str(batch.digest)) if self.training else None
        if factor is None or (once and Path(once).exists()):
            return sums
        if once:
            Path(once).touch()
        return LossSums(*(value * factor for value in sums))

    Decoder.forward = spoilt  # type: ignore[method-assign]
    skip = json.loads(os.environ.get("SKIP", "null"))
    if skip:
        initial = Loader.initial_state

        def jumped(self: Loader) -> DataState:
            return initial(self).with_skip(*skip)

        Loader.initial_state = jumped  # type: ignore[method-assign]


def digests_of_steps(arguments: list[str], steps: range) -> dict[int, list[str]]:
    """Digests of the micro-batches of each step of an untouched run."""
    config = load_config(arguments[0], arguments[1:])
    tokenizer = Tokenizer.load(config.tokenizer)
    with open_loader(config, tokenizer.byte_lengths(), World(0, 1)) as loader:
        state, found = loader.initial_state(), {}
        for step in range(steps.stop):
            if step in steps:
                found[step] = [str(batch.digest) for batch in loader.read(step, state).batches]
            state = loader.next_state(state)
    return found
