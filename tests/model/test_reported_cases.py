"""Failures that people reported of training arithmetic, tried on every family (docs/arithmetic.md has all of them)."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pretrain.config.schema import LossConfig
from pretrain.data.build import build
from pretrain.data.build_options import BuildOptions
from pretrain.data.loader import open_loader
from pretrain.data.sources import SourceSpec
from pretrain.data.tokenizer import train_bpe
from pretrain.model.registry import build_model
from pretrain.sequence import IGNORED_LABEL
from pretrain.topology import World
from tests.data_read.corpus import BYTE_LENGTHS, EOS, run_config, write_tokenizer_file, write_tokens
from tests.model.small import FAMILIES, VOCABULARY, batch_for, masked_batch, pair_batch

PAIRED = [name for name, config in FAMILIES.items() if config().layout == "encoder_decoder"]
ENCODING = [name for name, config in FAMILIES.items() if config().layout == "encoder"]


def test_a_step_has_its_whole_batch_also_where_an_epoch_ends_in_the_middle(tmp_path: Path) -> None:
    """7 rows an epoch, 4 micro-batches a step: 4 epochs are 7 steps, and nothing is dropped or left over."""
    tokenizer = write_tokenizer_file(tmp_path)
    write_tokens(tmp_path / "a", [[100 + k, *[50] * 14, EOS] for k in range(7)], tokenizer, block_tokens=16)
    config = run_config(tokenizer, {"a": tmp_path / "a"})
    assert (config.batch.global_batch_size, config.batch.sequence_length) == (8, 16)
    body = config.model_dump(mode="json")
    body["batch"] |= {"global_batch_size": 4, "micro_batch_size": 1}
    body["data"] |= {"lanes": 1}
    config = type(config).model_validate(body)
    seen: list[int] = []
    with open_loader(config, BYTE_LENGTHS, World()) as loader:
        state = loader.initial_state()
        for step in range(7):
            data = loader.read(step, state)
            assert len(data.batches) == 4
            assert data.target_tokens == 4 * 15
            seen += [int(batch.decoder_ids[0]) for batch in data.batches]
            state = loader.next_state(state)
    for epoch in range(4):
        assert sorted(seen[7 * epoch : 7 * epoch + 7]) == list(range(100, 107))
    assert set(Counter(seen).values()) == {4}


@pytest.mark.parametrize("family", PAIRED)
def test_an_encoder_looks_ahead_and_its_decoder_does_not(family: str) -> None:
    config = FAMILIES[family]()
    model = build_model(config, LossConfig(), seed=2).eval()
    batch = pair_batch([8, 3], [6, 5])
    assert batch.encoder_ids is not None
    source, target = batch.encoder_ids.clone(), batch.decoder_ids.clone()
    source[7] = (source[7] + 1) % VOCABULARY
    target[5] = (target[5] + 1) % VOCABULARY
    with torch.no_grad():
        before = model.logits(batch)
        assert not torch.equal(model.logits(replace(batch, encoder_ids=source))[0], before[0])
        later = model.logits(replace(batch, decoder_ids=target))
    assert torch.equal(later[:5], before[:5])
    assert not torch.equal(later[5], before[5])


@pytest.mark.parametrize("family", ENCODING)
def test_an_encoder_of_gaps_looks_ahead(family: str) -> None:
    config = FAMILIES[family]()
    model, batch = build_model(config, LossConfig(), seed=2).eval(), masked_batch([9, 4])
    ids = batch.decoder_ids.clone()
    ids[8] = (ids[8] + 1) % VOCABULARY
    with torch.no_grad():
        found, before = model.logits(replace(batch, decoder_ids=ids)), model.logits(batch)
    assert not torch.equal(found[0], before[0])
    assert torch.equal(found[9:], before[9:])


@pytest.mark.parametrize("family", FAMILIES)
def test_an_untrained_model_knows_nothing_of_its_labels(family: str) -> None:
    """A decoder that reads what it is to say, or a loss that counts ignored labels, would be far from ln V."""
    config = FAMILIES[family]()
    batch = batch_for(config)
    assert IGNORED_LABEL not in batch.decoder_ids
    with torch.no_grad():
        sums = build_model(config, LossConfig(), seed=2).eval()(batch)
    assert float(sums.nll) / batch.target_tokens == pytest.approx(math.log(VOCABULARY), rel=0.15)


def test_a_pair_with_an_empty_side_is_left_out_and_counted(tmp_path: Path) -> None:
    pairs = [("a cat", "eine Katze"), ("", "nichts"), ("nothing", " "), ("two dogs", "zwei Hunde")]
    texts = tmp_path / "pairs.jsonl"
    texts.write_text("".join(json.dumps({"s": source, "t": target}) + "\n" for source, target in pairs))
    train_bpe([text for pair in pairs for text in pair] * 9, 280).save(tmp_path / "tokenizer.json")
    report = build(
        BuildOptions(
            SourceSpec((str(texts),), source_field="s", target_field="t"), str(tmp_path / "out"),
            str(tmp_path / "tokenizer.json"), source_length=32, target_length=32, rows_per_block=4, workers=1,
        )
    )  # fmt: skip
    assert report.to_json()["empty"] == 2
    assert report.sources["train"][1].documents == 2
