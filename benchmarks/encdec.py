"""Encoder-decoder training: our T5 on packed pairs against `transformers`' T5 on length-grouped batches.

Pairs of random ids with the lengths of sentence pairs (log-normal, mean about 30 tokens, the two sides
correlated). Ours packs them into rows that hold 256 tokens on each side; theirs sorts pools of 50 batches by
length, as its Trainer's length grouping does, and pads each batch to its longest. Same sizes, dtype,
AdamW and clipping, an update for about as many tokens; tokens/s counts real source and target tokens only. Each
side runs in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import T5Config, T5ForConditionalGeneration

from benchmarks.machine import precision
from benchmarks.result import Result, clock, interleave, median, median_ratio
from pretrain.config.schema import RunConfig
from pretrain.data.packing import pack_window
from pretrain.engine.distributed import start_process_group, stop_process_group
from pretrain.engine.engine import Engine
from pretrain.model.registry import build_model
from pretrain.sequence import IGNORED_LABEL, Batch, SeqInfo
from pretrain.topology import World

CAPACITY, ROWS, PAIRS_PER_BATCH, POOL_BATCHES = 256, 4, 32, 50
# Of an update: 40,353 real tokens here and 38,904 there. Their first 20 batches are as full as all of them (0.703 and
# 0.701); of fewer, the sample decides (0.745 of 4).
MICROSTEPS, QUICK_MICROSTEPS = 20, 4
PAD, START = 0, 0


@dataclass(frozen=True, slots=True)
class Size:
    """Of the model that both sides train."""

    vocabulary_size: int = 8192
    width: int = 256
    num_heads: int = 4
    feed_forward_width: int = 1024
    num_layers: int = 4


@dataclass(frozen=True, slots=True)
class Pair:
    source: torch.Tensor
    target: torch.Tensor

    @property
    def tokens(self) -> int:
        return len(self.source) + len(self.target)


def make_pairs(count: int, vocabulary_size: int) -> list[Pair]:
    """Pairs whose lengths are those of sentences: log-normal, correlated, 4 to 120 tokens."""
    generator = np.random.default_rng(0)
    common, own = generator.normal(size=(2, count)), generator.normal(size=(2, count))
    lengths = np.exp(3.25 + 0.55 * (0.9 * common[0] + 0.44 * own)).clip(4, 120).astype(int)
    ids = torch.from_numpy(generator.integers(2, vocabulary_size, size=int(lengths.sum())))
    pieces = ids.split(lengths.T.flatten().tolist())
    return [Pair(source, target) for source, target in zip(pieces[::2], pieces[1::2], strict=True)]


# ---------------------------------------------------------------------------------------------- ours


def packed_batches(pairs: Sequence[Pair]) -> list[Batch]:
    """Micro-batches of full rows in random order, as a built pair source gives them."""
    lengths = np.array([[len(pair.source), len(pair.target)] for pair in pairs])
    packed = pack_window(lengths, (CAPACITY - 1, CAPACITY - 1))  # a slot stays free, as the writer leaves it
    rows = [packed[number] for number in np.random.default_rng(1).permutation(len(packed))]
    return [
        _batch(index, [pairs[number] for row in rows[start : start + ROWS] for number in row])
        for index, start in enumerate(range(0, len(rows) - ROWS + 1, ROWS))
    ]


def _batch(index: int, pairs: list[Pair]) -> Batch:
    slots = ROWS * CAPACITY
    sides = [[pair.source for pair in pairs], [pair.target for pair in pairs]]
    padded = [torch.cat([*side, torch.full((slots - sum(map(len, side)),), PAD)]) for side in sides]
    infos = [SeqInfo.from_lengths([*map(len, side), slots - sum(map(len, side))], padding=True) for side in sides]
    targets = sum(map(len, sides[1]))
    labels = padded[1].clone()
    labels[targets:] = IGNORED_LABEL
    decoder_ids = torch.cat([torch.tensor([START]), padded[1][:-1]])
    decoder_ids[infos[1].cu_seqlens[:-1].long()] = START
    return Batch(
        index=index, decoder_ids=decoder_ids, decoder_info=infos[1], labels=labels, encoder_ids=padded[0],
        encoder_info=infos[0], dropout_key=index, target_tokens=targets, target_bytes=targets, digest=0,
    )  # fmt: skip


def real_tokens(batch: Batch) -> int:
    assert batch.encoder_info is not None
    return sum(sum(info.lengths[:-1]) for info in (batch.decoder_info, batch.encoder_info))


def build_engine(size: Size, kind: str, microsteps: int) -> Engine:
    config = RunConfig.model_validate(
        {
            "name": "benchmark", "seed": 1, "tokenizer": "none", "objective": {"kind": "seq2seq"},
            "data": {"sources": {"none": {"path": "none"}}},
            "model": {
                "family": "t5", "vocabulary_size": size.vocabulary_size, "width": size.width,
                "num_heads": size.num_heads, "feed_forward_width": size.feed_forward_width,
                "num_encoder_layers": size.num_layers, "num_decoder_layers": size.num_layers,
                "tied_embeddings": False,
            },
            "batch": {
                "global_batch_size": ROWS * microsteps, "micro_batch_size": ROWS, "sequence_length": CAPACITY,
                "source_length": CAPACITY,
            },
            "optimizer": {"kind": "adamw", "learning_rate": 1e-3},
            "schedule": {"kind": "constant", "total_steps": 1000},
            "engine": {"zero_stage": 1, "precision": kind},
            "checkpoint": {"every_steps": 1000},
        }
    )  # fmt: skip
    model = build_model(config.model, config.loss, seed=1)
    return Engine(model, config, World(), torch.device("cpu"))


def our_step(engine: Engine, batches: list[Batch]) -> Callable[[], float]:
    """Gives tokens/s of one step over all micro-batches."""
    tokens, targets = sum(map(real_tokens, batches)), sum(batch.target_tokens for batch in batches)

    def step() -> float:
        start = clock()
        for batch in batches:
            engine.micro_step(batch, global_target_tokens=targets)
        engine.step(1e-3)
        return tokens / (clock() - start)

    return step


# -------------------------------------------------------------------------------------------- theirs


def grouped_batches(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Pools of 50 batches sorted by source length, cut into batches."""
    pool = PAIRS_PER_BATCH * POOL_BATCHES
    ordered = [
        pair
        for start in range(0, len(pairs), pool)
        for pair in sorted(pairs[start : start + pool], key=lambda pair: (len(pair.source), len(pair.target)))
    ]
    batches = [ordered[start : start + PAIRS_PER_BATCH] for start in range(0, len(ordered), PAIRS_PER_BATCH)]
    return [batches[number] for number in np.random.default_rng(1).permutation(len(batches))]


def padded(pairs: list[Pair]) -> dict[str, torch.Tensor]:
    """What their data collator gives."""
    pad = torch.nn.utils.rnn.pad_sequence
    source = pad([pair.source for pair in pairs], batch_first=True, padding_value=PAD)
    labels = pad([pair.target for pair in pairs], batch_first=True, padding_value=IGNORED_LABEL)
    return {"input_ids": source, "attention_mask": (source != PAD).long(), "labels": labels}


def their_step(size: Size, kind: str, batches: list[list[Pair]]) -> Callable[[], float]:
    """Gives tokens/s of one step over all batches: the loop of a person who knows how."""
    torch.manual_seed(1)
    config = T5Config(
        vocab_size=size.vocabulary_size, d_model=size.width, d_kv=size.width // size.num_heads,
        d_ff=size.feed_forward_width, num_layers=size.num_layers, num_decoder_layers=size.num_layers,
        num_heads=size.num_heads, feed_forward_proj="gated-gelu", tie_word_embeddings=False, dropout_rate=0.0,
        decoder_start_token_id=START, pad_token_id=PAD, use_cache=False,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = sum(pair.tokens for batch in batches for pair in batch)
    counts = [sum(len(pair.target) for pair in batch) for batch in batches]
    inputs = [padded(batch) for batch in batches]

    def step() -> float:
        start = clock()
        for values, count in zip(inputs, counts, strict=True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "bf16"):
                loss = model(**values).loss
            (loss * count / sum(counts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return tokens / (clock() - start)

    return step


def measure(*, quick: bool, command: str) -> list[Result]:
    """Ratio of real tokens/s, and how full our rows are beside their padded batches."""
    repetitions, kind = 2 if quick else 5, precision()
    size, microsteps = (Size(num_layers=2), QUICK_MICROSTEPS) if quick else (Size(), MICROSTEPS)
    pairs = make_pairs(2 * PAIRS_PER_BATCH * POOL_BATCHES, size.vocabulary_size)
    ours, theirs = packed_batches(pairs), grouped_batches(pairs)
    slots = [sum(x.numel() for name, x in padded(batch).items() if name != "attention_mask") for batch in theirs]
    fill = sum(map(real_tokens, ours)) / (len(ours) * 2 * ROWS * CAPACITY)
    start_process_group(World(), torch.device("cpu"), 60.0)
    try:
        engine = build_engine(size, kind, microsteps)
        sides = {
            "ours": our_step(engine, ours[:microsteps]),
            "theirs": their_step(size, kind, theirs[:microsteps]),
        }
        interleave(sides, 1)
        values = interleave(sides, repetitions)
        engine.close()
    finally:
        stop_process_group()
    return [
        Result(
            "encdec.vs_transformers_t5", median_ratio(values["ours"], values["theirs"]), "ratio",
            f"transformers' T5, length-grouped, {kind}, tokens/s", median(values["theirs"]), repetitions, command,
        ),
        Result(
            "encdec.fill_fraction", fill, "fraction", "their padded batches",
            sum(pair.tokens for batch in theirs for pair in batch) / sum(slots), 1, command,
        ),
    ]  # fmt: skip
