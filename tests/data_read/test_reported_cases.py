"""Failures that people reported of loaders elsewhere, each with the smallest input that shows it."""

from __future__ import annotations

import gc
import json
import threading
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain.config import config_from_dict
from pretrain.data.build import build
from pretrain.data.build_options import BuildOptions
from pretrain.data.forecast import rows_taken
from pretrain.data.format import Provenance, encode_provenance
from pretrain.data.loader import Loader, open_loader
from pretrain.data.shard_writer import BlockCounts, SourceWriter
from pretrain.data.sources import SourceSpec
from pretrain.data.state import DataState
from pretrain.data.tokenizer import train_bpe
from pretrain.errors import ConfigError, DataError
from pretrain.topology import World
from tests.data_read.corpus import BYTE_LENGTHS, EOS, header, run_config, write_tokenizer_file, write_tokens


def read(config: Any, count: int, world: World | None = None, lengths: Any = BYTE_LENGTHS) -> list[Any]:
    with open_loader(config, lengths, world or World()) as loader:
        state, found = loader.initial_state(), []
        for step in range(count):
            found.append(loader.read(step, state))
            state = loader.next_state(state)
    return found


def heads(steps: list[Any]) -> list[int]:
    """The number at the head of each row of 16."""
    return [int(i) for data in steps for batch in data.batches for i in batch.decoder_ids[::16]]


@pytest.mark.parametrize("weights", [(0.9, 0.1), (1.0, 1.0), (18.0, 2.0)])
def test_weights_are_relative_shares_of_rows_whatever_the_sources_hold_and_wherever_a_run_stops(
    tmp_path: Path, weights: tuple[float, float]
) -> None:
    tokenizer = write_tokenizer_file(tmp_path)
    for name, first, count in (("a", 100, 10), ("b", 150, 20)):
        write_tokens(tmp_path / name, [[first + k, *[50] * 14, EOS] for k in range(count)], tokenizer)
    sources = {name: (tmp_path / name, weight) for name, weight in zip("ab", weights, strict=True)}
    config = run_config(tokenizer, sources)
    wanted = weights[0] / sum(weights)
    with open_loader(config, BYTE_LENGTHS, World()) as loader:
        state, seen = loader.initial_state(), Counter()
        for step in range(25):
            for head in heads([loader.read(step, state)]):
                seen["a" if 100 <= head < 150 else "b" if head >= 150 else "padding"] += 1
            state = loader.resume(DataState.from_json(json.loads(json.dumps(loader.next_state(state).to_json()))))
            # Rows of padding at the end of a source's last block count as its rows.
            assert seen["a"] <= wanted * state.next_row + 1
    total = state.next_row
    assert total == 200
    assert abs(rows_taken(state, total)["a"] - wanted * total) <= 1


@pytest.mark.parametrize("weight", [0, -1, "much"])
def test_a_weight_that_is_no_share_is_refused(tmp_path: Path, weight: Any) -> None:
    tokenizer = write_tokenizer_file(tmp_path)
    body = run_config(tokenizer, {"a": tmp_path}).model_dump(mode="json")
    body["data"]["sources"]["a"]["weight"] = weight
    with pytest.raises(ConfigError, match=r"data\.sources\.a\.weight"):
        config_from_dict(body)


def test_documents_without_text_or_with_an_end_alone_stop_nothing_and_train_nothing(tmp_path: Path) -> None:
    """`""`, `" "` and a text that spells the end token: two are left out and counted, the third is text."""
    texts = tmp_path / "t.jsonl"
    kept = ["<|endoftext|>", "two words", *(f"number {n} of the others" for n in range(40))]
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("", " ", *kept)))
    tokenizer = train_bpe([*kept, "a<|endoftext|>b"], 300)
    tokenizer.save(tmp_path / "tokenizer.json")
    options = BuildOptions(
        SourceSpec((str(texts),)), str(tmp_path / "out"), str(tmp_path / "tokenizer.json"), block_tokens=64, workers=1
    )
    report = build(options)
    assert report.to_json()["empty"] == 2
    manifest = report.sources["train"][1]
    assert manifest.documents == len(kept)
    config = run_config(tmp_path / "tokenizer.json", {"t": tmp_path / "out"})
    steps = read(config, 6, lengths=tokenizer.byte_lengths())
    assert all(data.target_tokens > 0 for data in steps)
    # Documents that are nothing but their end: no target, and no rank is left without a batch.
    write_tokenizer_file(tmp_path)
    write_tokens(tmp_path / "ends", [[EOS]] * 128, tmp_path / "tokenizer.json")
    config = run_config(tmp_path / "tokenizer.json", {"e": tmp_path / "ends"})
    for ranks in (1, 3):
        for rank in range(ranks):
            for data in read(config, 2, World(rank, ranks, rank, ranks)):
                assert len(data.batches) == -(-4 // ranks)
                assert data.target_tokens == 0


def test_ids_outside_the_vocabulary_are_refused_where_they_are_written_and_where_they_are_read(tmp_path: Path) -> None:
    tokenizer = write_tokenizer_file(tmp_path)
    layout = header("s", tokenizer, kind="tokens", block_tokens=16)
    note = encode_provenance([Provenance("d", "made", 1)])
    for bad in (300, -1):
        ids = np.array([5] * 14 + [bad, EOS, EOS])
        message, counts = rf"token id {bad} is outside the vocabulary.* 0\.\.299", BlockCounts(1, 16, 0, 16)
        with (
            SourceWriter(tmp_path / f"w{bad}", layout, shard_blocks=1) as writer,
            pytest.raises(DataError, match=message),
        ):
            writer.add([ids, np.array([16])], note, counts)
    write_tokens(tmp_path / "good", [[250, 251, EOS]] * 40, tokenizer)
    smaller = run_config(tokenizer, {"g": tmp_path / "good"}, model__vocabulary_size=299)
    with pytest.raises(DataError, match=r"model\.vocabulary_size=299 is below the 300 of data\.sources\.g"):
        open_loader(smaller, BYTE_LENGTHS, World())


def test_memory_and_threads_stay_as_they_are_over_twenty_epochs(tmp_path: Path) -> None:
    tokenizer = write_tokenizer_file(tmp_path)
    write_tokens(tmp_path / "s", [[100 + k, *[50] * 14, EOS] for k in range(32)], tokenizer, shard_blocks=2)
    config = run_config(tokenizer, {"s": tmp_path / "s"})
    others = set(threading.enumerate())  # of tests before this one: some are still ending
    with open_loader(config, BYTE_LENGTHS, World()) as loader:
        assert isinstance(loader, Loader)
        state, sizes, threads = loader.initial_state(), [], set()
        tracemalloc.start()
        for epoch in range(20):
            for step in range(4 * epoch, 4 * epoch + 4):
                loader.read(step, state)
                state = loader.next_state(state)
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
            threads.add(len(set(threading.enumerate()) - others))
        tracemalloc.stop()
    assert max(sizes[3:]) < 1.5 * sizes[3] + 200_000
    assert sizes[-1] < sizes[3] + 200_000
    assert len(threads) == 1


def test_a_document_edited_in_place_is_another_source_and_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """Same size, one word changed: the build reads it anew, and a run that read the first refuses the second."""
    texts = tmp_path / "t.jsonl"
    lines = [json.dumps({"text": f"number {n} of forty"}) for n in range(40)]
    tokenizer = train_bpe([*lines], 300)
    tokenizer.save(tmp_path / "tokenizer.json")

    def built(out: str) -> Path:
        spec = SourceSpec((str(texts),))
        build(BuildOptions(spec, str(tmp_path / out), str(tmp_path / "tokenizer.json"), block_tokens=64, workers=1))
        return tmp_path / out

    texts.write_text("\n".join(lines) + "\n")
    first = built("first")
    texts.write_text("\n".join([*lines[:7], lines[7].replace("of", "OF"), *lines[8:]]) + "\n")
    second = built("second")
    lengths = tokenizer.byte_lengths()
    with open_loader(run_config(tmp_path / "tokenizer.json", {"t": first}), lengths, World()) as loader:
        state = loader.next_state(loader.initial_state())
    edited, message = run_config(tmp_path / "tokenizer.json", {"t": second}), r"data\.sources\.t holds other data"
    with open_loader(edited, lengths, World()) as loader, pytest.raises(DataError, match=message):
        loader.resume(state)
    train_bpe([*lines, "other words entirely"], 301).save(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"data\.sources\.t was built with tokenizer"):
        open_loader(run_config(tmp_path / "tokenizer.json", {"t": first}), lengths, World())
