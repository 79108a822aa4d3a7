"""Loss masks from a source's fields, against a plain tokenisation of the parts by the tokenizers library."""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from launch.cli import main
from pretrain.data.batch import sum_digests
from pretrain.data.blocks import BlockReader, CorruptBlockError
from pretrain.data.build import build
from pretrain.data.build_options import BuildOptions
from pretrain.data.explain import explain_step
from pretrain.data.format import ShardIndex
from pretrain.data.loader import open_loader
from pretrain.data.repack import RepackOptions, repack
from pretrain.data.sources import SourceSpec, read_documents
from pretrain.data.stats import source_stats
from pretrain.data.tokenizer import Tokenizer
from pretrain.data.trained_parts import TrainedParts, split_marks, with_marks
from pretrain.data.verify import verify_source
from pretrain.errors import DataError
from pretrain.sequence import IGNORED_LABEL
from pretrain.store import open_store
from pretrain.topology import World
from tests.data_build.corpus import file_hashes, manifest_of, random_text, webdataset_blocks, write_jsonl
from tests.data_read.corpus import run_config

Parts = list[tuple[str, bool]]
MESSAGES = TrainedParts(messages="messages", template="<{role}>\n{content}\n")


def conversations(count: int) -> list[dict[str, Any]]:
    rng = random.Random(4)
    return [
        {
            "messages": [
                {"role": ("user", "assistant")[turn % 2], "content": f"{number}.{turn} {random_text(rng, 12)}"}
                for turn in range(rng.randint(1, 5))
            ]
        }
        for number in range(count)
    ]


def parts_by_hand(record: dict[str, Any]) -> Parts:
    """What the template makes, written out."""
    parts: Parts = []
    for message in record["messages"]:
        parts += [(f"<{message['role']}>\n", False), (message["content"] + "\n", message["role"] == "assistant")]
    return parts


def expected(tokenizer_path: str, eos: int, parts: Parts) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(ids with eos, whether each is trained), each part by itself through the bare library."""
    encoder = tokenizers.Tokenizer.from_file(tokenizer_path)
    ids: list[int] = []
    marks: list[int] = []
    for text, trained in parts:
        found = encoder.encode(text, add_special_tokens=False).ids
        ids += found
        marks += [int(trained)] * len(found)
    last = [trained for text, trained in parts if text][-1]
    return (*ids, eos), (*marks, int(last))


def stored(directory: Path) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(ids, marks) of each document as the stock webdataset library reads them."""
    manifest, found = manifest_of(directory), []
    stream: list[tuple[int, int]] = []
    for block in webdataset_blocks(directory):
        assert len(block["mask"]) == len(block["tok"]) == manifest.block_tokens + 1
        here = list(zip(block["tok"], block["mask"], strict=True))[:-1]
        if not manifest.row_tokens:
            stream += here
            continue
        start = 0
        for end in block["end"]:
            begin = max(start, (end - 1) // manifest.row_tokens * manifest.row_tokens)
            stream += here[begin:end]
            start = end
    document: list[tuple[int, int]] = []
    for token in stream[: manifest.tokens]:
        document.append(token)
        if token[0] == manifest.eos_id:
            ids, marks = zip(*document, strict=True)
            found.append((ids, marks))
            document = []
    assert not document
    return found


def options(inputs: Path, out: Path, tokenizer_path: str, trained: TrainedParts, **changes: Any) -> BuildOptions:
    values: dict[str, Any] = {"block_tokens": 128, "shard_blocks": 4, "workers": 1, "name": "same", **changes}
    return BuildOptions(SourceSpec((str(inputs),), trained=trained), str(out), tokenizer_path, **values)


@pytest.mark.parametrize("row_tokens", [0, 512])
def test_blocks_hold_the_tokens_of_the_parts_and_a_repack_loses_no_mark(
    tmp_path: Path, texts: Path, tokenizer_path: str, tokenizer: Tokenizer, row_tokens: int
) -> None:
    records = conversations(60)
    path = write_jsonl(texts / "c.jsonl", records)
    wanted = Counter(expected(tokenizer_path, tokenizer.eos_id, parts_by_hand(record)) for record in records)
    common = {"block_tokens": 512}
    build(options(path, tmp_path / "out", tokenizer_path, MESSAGES, row_tokens=row_tokens, **common))
    assert Counter(stored(tmp_path / "out")) == wanted
    assert verify_source(open_store(tmp_path / "out")).problems == ()
    marks = [mark for _, document in stored(tmp_path / "out") for mark in document]
    assert source_stats(open_store(tmp_path / "out")).trained_fraction == sum(marks) / len(marks)
    other = 512 - row_tokens
    repack(RepackOptions(str(tmp_path / "out"), str(tmp_path / "again"), workers=1, row_tokens=other))
    build(options(path, tmp_path / "fresh", tokenizer_path, MESSAGES, row_tokens=other, **common))
    assert file_hashes(tmp_path / "again") == file_hashes(tmp_path / "fresh")


def test_a_changed_mark_is_found_by_verify_and_by_the_reader(tmp_path: Path, texts: Path, tokenizer_path: str) -> None:
    out = tmp_path / "out"
    build(options(write_jsonl(texts / "c.jsonl", conversations(20)), out, tokenizer_path, MESSAGES))
    manifest, data = manifest_of(out), bytearray((out / "00000.tar").read_bytes())
    index = ShardIndex.from_bytes((out / "00000.tar.idx").read_bytes(), manifest, 0, "index")
    member = manifest.members.index("mask.u1")
    for block, place in ((0, 0), (1, 77), (2, 128)):
        span = index.span(block, member)
        data[span.offset + place] ^= 1
        (out / "00000.tar").write_bytes(data)
        problems = verify_source(open_store(out)).problems
        assert any(f"block {block}: mask.u1 does not match its crc32" in problem for problem in problems), problems
        with pytest.raises(CorruptBlockError, match=rf"block {block} .*the crc32 of mask\.u1 is not the index's"):
            BlockReader(open_store(out), manifest).read(block)
        data[span.offset + place] ^= 1


def test_an_epoch_trains_every_marked_token_once_for_any_ranks_and_replays(
    tmp_path: Path, texts: Path, tokenizer_path: str, tokenizer: Tokenizer
) -> None:
    records = conversations(80)
    build(options(write_jsonl(texts / "c.jsonl", records), tmp_path / "out", tokenizer_path, MESSAGES))
    blocks = manifest_of(tmp_path / "out").blocks
    rows = blocks * 8
    config = run_config(
        Path(tokenizer_path), {"chat": tmp_path / "out"}, data__lanes=1, batch__global_batch_size=rows // 4,
        batch__micro_batch_size=1 if rows // 4 % 2 else 2,
    )  # fmt: skip
    wanted: Counter[int] = Counter()
    for record in records:
        ids, marks = expected(tokenizer_path, tokenizer.eos_id, parts_by_hand(record))
        wanted += Counter(i for i, mark in zip(ids[1:], marks[1:], strict=True) if mark)

    def read(world: World) -> list[Any]:
        with open_loader(config, tokenizer.byte_lengths(), world) as loader:
            state, found = loader.initial_state(), []
            for step in range(4):
                found.append(loader.read(step, state))
                state = loader.next_state(state)
        return found

    whole = read(World())
    labels = [int(i) for data in whole for batch in data.batches for i in batch.labels if i != IGNORED_LABEL]
    assert Counter(labels) == wanted
    assert sum(data.target_tokens for data in whole) == sum(wanted.values())
    spelt = tokenizer.byte_lengths()[labels].sum()
    assert sum(batch.target_bytes for data in whole for batch in data.batches) == spelt
    parts = [read(World(rank, 3, rank, 3)) for rank in range(3)]
    for step, data in enumerate(whole):
        assert sum_digests(part[step].digest for part in parts) == data.digest
    shown = [part for row in explain_step(config, 1) for part in row.documents]
    assert any(part.trained_tokens == 0 for part in shown)
    assert any(0 < (part.trained_tokens or 0) < part.num_tokens for part in shown)


def test_other_objectives_and_pairs_refuse_trained_parts(tmp_path: Path, texts: Path, tokenizer_path: str) -> None:
    build(options(write_jsonl(texts / "c.jsonl", conversations(30)), tmp_path / "out", tokenizer_path, MESSAGES))
    config = run_config(Path(tokenizer_path), {"chat": tmp_path / "out"}, objective__kind="prefix_lm")
    lengths = np.ones(300, dtype=np.int32)
    with pytest.raises(DataError, match=r"objective\.kind=prefix_lm does not fit data\.sources\.chat, which says what"):
        open_loader(config, lengths, World())
    with pytest.raises(DataError, match="source_field with trained parts is not supported"):
        SourceSpec(("x",), source_field="a", target_field="b", trained=MESSAGES)


def test_prompts_spans_and_tars_give_the_same_parts(tmp_path: Path, texts: Path) -> None:
    """Spans count characters, not bytes, also in the text member of a tar."""
    text = "Größe? 日本 ist schön. Ja."
    spans = [[7, 9], [24, 27]]
    wanted = [("Größe? ", 0), ("日本", 1), (" ist schön. Ja."[:15], 0)]
    assert text[7:9] == "日本"
    write_jsonl(texts / "s.jsonl", [{"text": text, "loss": spans[:1]}])
    with tarfile.open(texts / "s.tar", "w") as archive:
        for name, data in (("d.txt", text.encode()), ("d.json", json.dumps({"loss": spans[:1]}).encode())):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    for name in ("s.jsonl", "s.tar"):
        spec = SourceSpec((str(texts / name),), trained=TrainedParts(spans="loss"))
        (document,) = read_documents(spec)
        lengths = np.frombuffer(document.trained or b"", dtype="<u8").tolist()
        assert document.text == text
        assert [(value // 2, value & 1) for value in lengths] == [(len(t.encode()), mark) for t, mark in wanted]
    write_jsonl(texts / "p.jsonl", [{"prompt": "Say ä: ", "completion": "ä", "id": 7}])
    spec = SourceSpec((str(texts / "p.jsonl"),), trained=TrainedParts(prompt="prompt", completion="completion"))
    (document,) = read_documents(spec)
    assert (document.text, document.id) == ("Say ä: ä", "7")
    assert np.frombuffer(document.trained or b"", dtype="<u8").tolist() == [2 * 8, 2 * 2 + 1]


@pytest.mark.parametrize(
    ("record", "trained", "message"),
    [
        ({"text": "abc", "loss": [[1, 4]]}, {"spans": "loss"}, r"'loss' has \[1, 4\] in a text of 3 characters"),
        ({"text": "abc", "loss": [[1, 2], [1, 3]]}, {"spans": "loss"}, r"has \[1, 3\] .* do not overlap"),
        ({"text": "abc", "loss": "all"}, {"spans": "loss"}, r"field 'loss' is no list"),
        ({"text": "abc"}, {"messages": "messages"}, r"has no field 'messages' \(it has: text\)"),
        ({"messages": ["hello"]}, {"messages": "messages"}, r"message 0 of 'messages' is str\. A message is an object"),
        ({"messages": [{"role": "user"}]}, {"messages": "messages"}, r"message 0 .* has no field 'content'"),
        ({"prompt": "a"}, {"prompt": "prompt", "completion": "answer"}, r"has no field 'answer'"),
    ],
)
def test_a_record_of_another_form_is_named(texts: Path, record: Any, trained: Any, message: str) -> None:
    path = write_jsonl(texts / "c.jsonl", [record])
    with pytest.raises(DataError, match=message):
        list(read_documents(SourceSpec((str(path),), trained=TrainedParts(**trained))))


def test_forms_that_do_not_go_together_are_refused(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for fields, message in (
        ({"prompt": "p"}, "prompt_field and completion_field go together"),
        ({"spans": "s", "messages": "m"}, "given as messages and spans"),
        ({"messages": "m", "template": "{content}"}, "message_template='{content}' does not fit"),
    ):
        with pytest.raises(DataError, match=message):
            TrainedParts(**fields)
    (texts / "plain.txt").write_text("text")
    with pytest.raises(DataError, match=r"plain\.txt is plain text\. What is trained on is said by a field"):
        list(read_documents(SourceSpec((str(texts / "plain.txt"),), trained=MESSAGES)))
    assert main(["data", "build", str(texts), "--out", str(texts / "o"), "--tokenizer", "t", "--train-role", "x"]) == 2
    assert "train_role and message_template have no effect without messages" in capsys.readouterr().err


def test_the_command_builds_a_conversation(
    tmp_path: Path, texts: Path, tokenizer_path: str, tokenizer: Tokenizer
) -> None:
    path = write_jsonl(texts / "c.jsonl", conversations(20))
    words = ["data", "build", path, "--tokenizer", tokenizer_path, "--out", tmp_path / "out", "--block-tokens", 64,
             "--workers", 1, "--messages-field", "messages", "--train-role", "user", "--no-plot",
             "--message-template", "{role}> {content}\\n"]  # fmt: skip
    assert main([str(word) for word in words]) == 0
    wanted: Counter[Any] = Counter()
    for record in conversations(20):
        parts: Parts = []
        for message in record["messages"]:
            parts += [(f"{message['role']}> ", False), (message["content"] + "\n", message["role"] == "user")]
        wanted[expected(tokenizer_path, tokenizer.eos_id, parts)] += 1
    assert Counter(stored(tmp_path / "out")) == wanted


def test_marks_survive_any_id_below_their_bit() -> None:
    ids = np.array([0, 1, 65535, 2**31 - 1], dtype=np.uint32)
    marks = np.array([1, 0, 1, 1], dtype=np.uint8)
    back, again = split_marks(with_marks(ids, marks))
    assert back.tolist() == ids.tolist()
    assert again.tolist() == marks.tolist()
