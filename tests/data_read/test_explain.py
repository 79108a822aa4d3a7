"""From a row back to its documents, compared with what training was given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from launch import cli
from pretrain.config.schema import RunConfig
from pretrain.data.blocks import BlockReader
from pretrain.data.explain import explain_row, explain_step, format_explanations
from pretrain.data.loader import open_loader
from pretrain.data.state import DataState
from pretrain.data.tokenizer import Tokenizer, train_bpe
from pretrain.errors import DataError, UserError
from pretrain.topology import World
from tests.data_read.corpus import BYTE_LENGTHS, PAIR_CHANGES, run_config, write_pairs, write_tokens

TEXTS = [f"document {i} says {'many ' * (i % 9)}words, number {i * 7919}." for i in range(60)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("explain")
    tokenizer = train_bpe(TEXTS, 300)
    tokenizer.save(root / "tokenizer.json")
    ids = [[*row.tolist(), tokenizer.eos_id] for row in tokenizer.encode_batch(TEXTS)]
    write_tokens(root / "text", ids, root / "tokenizer.json")
    short = [document[:7] for document in ids]
    write_pairs(root / "pairs", [(s, s[:5]) for s in short], root / "tokenizer.json")
    return root


def text_config(root: Path) -> RunConfig:
    return run_config(root / "tokenizer.json", {"t": root / "text"})


def test_the_documents_of_a_step_are_those_that_training_reads(root: Path) -> None:
    config, tokenizer = text_config(root), Tokenizer.load(root / "tokenizer.json")
    begun: dict[str, int] = {}
    with open_loader(config, BYTE_LENGTHS, World()) as loader:
        state = loader.initial_state()
        for step in range(6):
            data = loader.read(step, state)
            rows = explain_step(config, step)
            assert [r.row for r in rows] == list(range(step * 8, step * 8 + 8))
            assert [r.micro_batch for r in rows] == [0, 0, 1, 1, 2, 2, 3, 3]
            for batch in data.batches:
                mine = rows[2 * batch.index : 2 * batch.index + 2]
                parts = [part for row in mine for part in row.documents]
                lengths = list(batch.decoder_info.lengths)
                assert lengths[: len(parts)] == [part.num_tokens for part in parts]
                at = 0
                for part, length in zip(parts, lengths, strict=False):
                    assert part.text == tokenizer.decode(batch.decoder_ids[at : at + length].tolist())
                    number = int(part.id.removeprefix("doc-"))
                    assert part.line == number + 1
                    assert part.origin == "made.jsonl"
                    assert part.text in TEXTS[number]
                    assert part.begins == (part.text != "" and TEXTS[number].startswith(part.text))
                    assert part.ends == (int(batch.decoder_ids[at + length - 1]) == tokenizer.eos_id)
                    begun[part.id] = begun.get(part.id, 0) + part.begins
                    at += length
            state = loader.next_state(state)
    assert begun
    assert max(begun.values()) == 1


def test_a_pair_shows_both_sides(root: Path) -> None:
    config = run_config(root / "tokenizer.json", {"p": root / "pairs"}, **PAIR_CHANGES)
    parts = [part for step in range(4) for row in explain_step(config, step) for part in row.documents]
    assert len(parts) > 40
    for part in parts:
        assert part.source_text
        assert part.source_text.startswith(part.text)
        assert part.begins
        assert part.ends


def test_a_row_and_its_step_agree_and_read_well(root: Path) -> None:
    config = text_config(root)
    row = explain_row(config, 19)
    assert row == explain_step(config, 2)[3]
    assert (row.step, row.micro_batch, row.source, row.epoch, row.masked) == (2, 1, "t", 0, False)
    text = format_explanations([row], characters=10)
    assert text.startswith("row 19 (step 2, micro-batch 1): source t, epoch 0, 0000")
    assert f"  made.jsonl:{row.documents[0].line} [{row.documents[0].id}], {row.documents[0].num_tokens} tokens" in text
    assert json.loads(json.dumps(row.to_json()))["documents"][0]["text"] == row.documents[0].text


def test_the_state_of_a_checkpoint_moves_steps_and_marks_rows(root: Path) -> None:
    config = text_config(root)
    with open_loader(config, BYTE_LENGTHS, World()) as loader:
        state: DataState = loader.initial_state().with_skip(8, 20)
        block = explain_row(config, 28).block
        state = loader.next_state(state)
        assert state.next_row == 20
        state = state.with_quarantine([("t", block)])
        state = state.with_segment(replace(state.segment, global_batch_size=4))
    assert [r.row for r in explain_step(config, 1, state=state)] == [20, 21, 22, 23]
    skipped = explain_row(config, 10, state=state)
    assert (skipped.step, skipped.micro_batch) == (None, None)
    assert "row 10 (skipped)" in format_explanations([skipped])
    assert explain_row(config, 28, state=state).step == 3
    assert explain_row(config, 28, state=state).masked
    assert explain_row(config, 28).step == 3
    assert not explain_row(config, 28).masked


def test_negative_numbers_and_missing_sources_are_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="row=-1 is negative"):
        explain_row(text_config(root), -1)
    with pytest.raises(UserError, match="step=-1 is negative"):
        explain_step(text_config(root), -1)
    with pytest.raises(DataError, match=r"holds no manifest\.json"):
        explain_row(run_config(root / "tokenizer.json", {"t": tmp_path}), 0)


def test_the_command_takes_overrides_follows_stages_and_reads_no_more_for_a_late_step(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reads = tmp_path / "run.yaml", list[int]()
    path.write_text(yaml.safe_dump(text_config(root).model_dump(mode="json", exclude_unset=True)))
    read = BlockReader.read
    monkeypatch.setattr(BlockReader, "read", lambda self, block, **k: (reads.append(block), read(self, block, **k))[1])
    stages = "data.stages=[{from_step: 8, global_batch_size: 12}, {from_step: 20, sequence_length: 8}]"
    for step, rows, length in ((7, 8, 16), (8, 12, 16), (20, 12, 8), (10**12, 12, 8)):
        reads.clear()
        words = [stages, "seed=9", "schedule.total_steps=30"]
        assert cli.main(["data", "explain", str(path), "--step", str(step), "--json", *words]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [row["step"] for row in found] == [step] * rows
        assert all(sum(part["num_tokens"] for part in row["documents"]) <= length for row in found)
        assert len(reads) <= rows
