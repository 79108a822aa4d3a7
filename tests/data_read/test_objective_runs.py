"""Random objectives through loader and validation: replayed whoever reads, and the same at every validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pretrain.config.schema import RunConfig
from pretrain.data.loader import open_loader
from pretrain.data.validation import open_validation
from pretrain.errors import DataError
from pretrain.sequence import IGNORED_LABEL, Batch
from pretrain.topology import World
from tests.data_read.corpus import (
    BYTE_LENGTHS,
    EOS,
    VOCABULARY,
    random_documents,
    run_config,
    write_tokenizer_file,
    write_tokens,
)

DOCUMENTS = random_documents(60, 30, 4)
_ENCODER = {
    "family": "encoder", "vocabulary_size": VOCABULARY + 1, "width": 8, "num_heads": 2, "feed_forward_width": 8,
    "num_layers": 1, "max_length": 64,
}  # fmt: skip
_SPECIALS = {"<|fim_prefix|>": 10, "<|fim_suffix|>": 11, "<|fim_middle|>": 12} | {
    "<|mode_r|>": 13, "<|mode_s|>": 14, "<|mode_x|>": 15,
    **{f"<extra_id_{number}>": 20 + number for number in range(16)},
}  # fmt: skip
_PAIRED = {key: value for key, value in _ENCODER.items() if key not in ("num_layers", "max_length")} | {
    "num_encoder_layers": 1, "num_decoder_layers": 1,
}  # fmt: skip
OBJECTIVES: dict[str, dict[str, Any]] = {
    "masked_lm": {"model": _ENCODER, "objective__kind": "masked_lm"},
    "prefix_lm": {"objective__kind": "prefix_lm"},
    "fill_in_the_middle": {"objective__kind": "fill_in_the_middle", "objective__min_document_tokens": 4},
    "span_corruption": {
        "model": {**_PAIRED, "family": "t5"},
        "objective__kind": "span_corruption",
        "objective__min_document_tokens": 2,
    },
    "ul2": {
        "model": {**_PAIRED, "family": "encoder_decoder"},
        "objective__kind": "ul2",
        "objective__min_document_tokens": 2,
    },
    "ul2 decoder": {"objective__kind": "ul2", "objective__min_document_tokens": 2},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("objectives")
    write_tokens(root / "text", DOCUMENTS, write_tokenizer_file(root))
    return root


def config_of(root: Path, objective: str, **changes: Any) -> RunConfig:
    source = root / "text"
    held = {"v": {"path": str(source)}}
    return run_config(
        root / "tokenizer.json", {"t": source}, data__validation=held, **(OBJECTIVES[objective] | changes)
    )


def steps(config: RunConfig, count: int, ranks: int = 1) -> list[dict[int, Batch]]:
    """Micro-batches by number of the first steps, over all ranks."""
    found: list[dict[int, Batch]] = [{} for _ in range(count)]
    for rank in range(ranks):
        with open_loader(config, BYTE_LENGTHS, World(rank=rank, size=ranks), special_ids=_SPECIALS) as loader:
            state = loader.initial_state()
            for step in range(count):
                found[step] |= {batch.index: batch for batch in loader.read(step, state).batches if batch.index >= 0}
                state = loader.next_state(state)
    return found


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_micro_batch_is_the_same_whoever_reads_it_and_whenever(root: Path, objective: str) -> None:
    config = config_of(root, objective)
    alone, split = steps(config, 3), steps(config, 3, ranks=3)
    assert [sorted(step) for step in alone] == [[0, 1, 2, 3]] * 3
    for a, b in zip(alone, split, strict=True):
        assert {j: batch.digest for j, batch in a.items()} == {j: batch.digest for j, batch in b.items()}
    with open_loader(
        config, BYTE_LENGTHS, World(), special_ids=_SPECIALS
    ) as loader:  # the third step alone, as after a resume
        state = loader.next_state(loader.next_state(loader.initial_state()))
        assert [batch.digest for batch in loader.read(2, state).batches] == [alone[2][j].digest for j in range(4)]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_same_row_is_disturbed_otherwise_in_another_step_or_run(root: Path, objective: str) -> None:
    config, other_seed = config_of(root, objective), config_of(root, objective, seed=8)
    with open_loader(config, BYTE_LENGTHS, World(), special_ids=_SPECIALS) as loader:
        state = loader.initial_state()
        first, again = loader.read(0, state), loader.read(1, state)
    assert first.digest != again.digest
    with open_loader(other_seed, BYTE_LENGTHS, World(), special_ids=_SPECIALS) as loader:
        assert loader.read(0, loader.initial_state()).digest != first.digest


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_validation_is_disturbed_the_same_way_each_time_at_any_micro_batch(root: Path, objective: str) -> None:
    def held(**changes: Any) -> list[list[int]]:
        config = config_of(root, objective, **changes)
        (source,) = open_validation(config, BYTE_LENGTHS, World(), special_ids=_SPECIALS).values()
        passes = [
            [int(label) for batch in source.batches() for label in batch.labels if label != IGNORED_LABEL]
            for _ in range(2)
        ]
        assert passes[0] == passes[1]
        return passes[0]

    expected = held()
    assert len(expected) > 50
    assert held(batch__micro_batch_size=1) == held(batch__micro_batch_size=8) == expected
    assert held(seed=8) == expected


def test_unmasked_tokens_are_the_text_and_ends_of_documents_stay(root: Path) -> None:
    plain = steps(run_config(root / "tokenizer.json", {"t": root / "text"}), 2)
    masked = steps(config_of(root, "masked_lm"), 2)
    for a, b in zip(plain, masked, strict=True):
        for j, batch in a.items():
            text, seen, labels = batch.decoder_ids, b[j].decoder_ids, b[j].labels
            chosen = labels != IGNORED_LABEL
            assert 0 < int(chosen.sum()) < 0.5 * len(labels)
            assert torch.equal(torch.where(chosen, labels, seen), text)
            assert not chosen[text == EOS].any()
            assert b[j].decoder_info.lengths == batch.decoder_info.lengths
            assert b[j].target_tokens == int(chosen.sum())
            assert b[j].target_bytes == int(BYTE_LENGTHS[labels[chosen].numpy()].sum(dtype=np.int64))


def test_a_vocabulary_without_an_id_for_the_mask_is_refused(root: Path) -> None:
    config = config_of(root, "masked_lm", model__vocabulary_size=VOCABULARY)
    with pytest.raises(DataError, match=rf"leaves no id for the mask.*Set model\.vocabulary_size={VOCABULARY + 1}"):
        open_loader(config, BYTE_LENGTHS, World())
    named = config_of(root, "masked_lm", model__vocabulary_size=VOCABULARY, objective__mask_id=5)
    batch = steps(named, 1)[0][0]
    assert (batch.decoder_ids == 5).any()


def test_what_the_tokenizer_lacks_is_named_with_the_option_that_adds_it(root: Path) -> None:
    without = {name: number for name, number in _SPECIALS.items() if name not in ("<extra_id_2>", "<|fim_middle|>")}
    for objective, text in (
        ("span_corruption", r"has 2 sentinels .* objective.kind=span_corruption with batch.sequence_length=16 needs"),
        ("fill_in_the_middle", r"no special token <\|fim_middle\|> .*--fill-in-the-middle"),
    ):
        config = (
            config_of(root, objective, objective__noise_density=0.5)
            if "span" in objective
            else config_of(root, objective)
        )
        with pytest.raises(DataError, match=text):
            open_loader(config, BYTE_LENGTHS, World(), special_ids=without)
    with pytest.raises(DataError, match=r"no special token <\|mode_r\|> or \[NLU\].*--modes"):
        open_loader(config_of(root, "ul2"), BYTE_LENGTHS, World(), special_ids={})


def test_fixed_shapes_are_the_capacities_and_a_digest_sees_a_changed_prefix(root: Path) -> None:
    config = config_of(root, "prefix_lm")
    causal = config_of(root, "prefix_lm", objective__bidirectional_prefix=False)
    both, one_way = steps(config, 1)[0], steps(causal, 1)[0]
    for j, batch in both.items():
        assert batch.decoder_info.prefix is not None
        assert one_way[j].decoder_info.prefix is None
        assert torch.equal(batch.decoder_ids, one_way[j].decoder_ids)
        assert torch.equal(batch.labels, one_way[j].labels)
        assert batch.digest != one_way[j].digest
    batch = steps(config_of(root, "span_corruption"), 1)[0][0]
    assert batch.encoder_ids is not None
    assert batch.encoder_info is not None
    assert batch.encoder_ids.numel() == 2 * 24  # 16 tokens of text and a free slot, in eights
    assert batch.decoder_info.padding
    assert batch.encoder_info.padding
