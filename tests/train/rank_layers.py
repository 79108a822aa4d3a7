"""What the ranks of `test_layer_watch` compute: norms of one step at every ZeRO stage, and what watching costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pretrain.sequence import SeqInfo
from pretrain.topology import World
from pretrain.train.layer_watch import LayerWatch
from tests.engine.small import MICRO_BATCHES, TOKENS, empty_batch, make_engine, micro_batch, run_config

RATE = 0.01
PADDING = replace(empty_batch(), decoder_info=SeqInfo.from_lengths([TOKENS], padding=True))
# ZeRO stage, activation checkpointing, deviation of the initial weights: with hardly any every head is flat.
CASES = ((0, False, 0.2), (1, False, 0.2), (2, True, 0.2), (3, False, 0.2), (3, True, 0.2), (1, False, 1e-6))


def watched_steps(world: World) -> dict[str, Any]:
    """Tables of the second step by stage and checkpointing; the first moves the optimizer's state."""
    found = {}
    for stage, checkpointing, init_std in CASES:
        config = run_config(stage, activation_checkpointing=checkpointing, dropout=0.2)
        config = config.model_copy(update={"model": config.model.model_copy(update={"init_std": init_std})})
        engine = make_engine(config, world)
        for step in (0, 1):
            watch = LayerWatch(engine, attention=world.is_main) if step else None
            if watch:
                with watch.forward(PADDING):  # it has no document to look at; the next one is looked at
                    pass
            batches = [micro_batch(step, j) for j in range(MICRO_BATCHES)]
            targets = sum(batch.target_tokens for batch in batches)
            mine = batches[world.rank :: world.size]
            mine += [empty_batch()] * (engine.accumulation_steps - len(mine))
            for batch in mine:
                watching = watch.forward(batch) if watch and batch.index >= 0 else None
                engine.micro_step(batch, global_target_tokens=targets, watching=watching)
            engine.step(RATE)
            if watch:
                watch.after_step()
                found["flat" if init_std < 0.1 else f"{stage} {checkpointing}"] = watch.tables()
        engine.close()
    return found
