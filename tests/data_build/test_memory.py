"""The external sort under a limit of memory that its corpus is four times as large as."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from string import ascii_lowercase

import pytest

from pretrain.data.build import build
from pretrain.data.tokenizer import train_bpe
from tests.data_build.corpus import file_hashes, text_options

# A sixteenth of 1 GB beside what the process is before it begins, and four times that of text.
LIMIT, CORPUS = 64 * 2**20, 256 * 2**20

_LIMITED = """
import resource, sys
def limit(extra):
    data = next(line for line in open('/proc/self/status') if line.startswith('VmData'))
    most = int(data.split()[1]) * 1024 + extra
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
"""

_SORT = """
import hashlib
from pretrain.data.spill import RunWriter, Spilled, ranges_of, read_range, slot_sizes
from pretrain.store import open_store
store, limit_bytes, corpus_bytes = open_store(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
limit(limit_bytes)
text_bytes = 4096
count = corpus_bytes // text_bytes
filler = bytes(text_bytes - 8)
writer = RunWriter(store, "runs/0", 8 * 2**20, deduplicate=True)
total = 0
for number in range(count + count // 100):
    number = number if number < count else (number - count) * 97  # a hundredth comes twice
    key = hashlib.blake2b(number.to_bytes(8, "big"), digest_size=16).digest()
    writer.add(Spilled(key, key, 0, number, False, b"1", filler + number.to_bytes(8, "big"), None))
runs = writer.close()
seen, before = 0, b""
for low, high in ranges_of(slot_sizes(store, runs), 4 * 2**20):
    for documents in read_range(store, runs, low, high, deduplicate=True, budget_bytes=8 * 2**20):
        for one in documents:
            assert before < one.order
            number = int.from_bytes(one.text[-8:], "big")
            assert one.order == hashlib.blake2b(number.to_bytes(8, "big"), digest_size=16).digest()
            before, seen = one.order, seen + 1
            total += number
assert seen == count, (seen, count)
assert total == count * (count - 1) // 2
print("sorted", len(runs), seen)
"""


def _run(program: str, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _LIMITED + program, *words], capture_output=True, text=True, timeout=timeout
    )


def test_a_corpus_of_four_times_the_memory_is_sorted_and_each_document_comes_once(tmp_path: Path) -> None:
    result = _run(_SORT, str(tmp_path), str(LIMIT), str(CORPUS))
    assert result.returncode == 0, result.stderr[-2000:]
    words = result.stdout.split()
    assert words[0] == "sorted"
    assert int(words[1]) > 30, "it took many runs"
    assert int(words[2]) == CORPUS // 4096


def test_the_limit_is_one_that_holding_the_corpus_would_break() -> None:
    result = _run("limit(int(sys.argv[1]))\nheld = [bytes([n % 256]) * 2**20 for n in range(256)]", str(LIMIT))
    assert result.returncode == 1
    assert "MemoryError" in result.stderr


_BUILD = """
import numpy, random, time
from pretrain.data.build import BuildOptions, build
from pretrain.data.sources import SourceSpec
from pretrain.data.tokenizer import Tokenizer
Tokenizer.load(sys.argv[3]).encode_batch(["warm"])
limit(int(sys.argv[4]))
started = time.time()
report = build(BuildOptions(SourceSpec((sys.argv[1],)), sys.argv[2], sys.argv[3], workers=1, name="same",
                            memory_bytes=int(sys.argv[4]) // 2))
print(report.sources["train"][1].documents, round(time.time() - started))
"""


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("scale", [4, 1])  # in 64 MB the tokenizer itself finds no room
def test_a_build_of_four_times_the_memory_gives_the_same_bytes(tmp_path: Path, scale: int) -> None:
    """1 GB over `scale`, with text of four times that; compared with a build by two workers without a limit."""
    # Long words that come again: the tokenizer takes a third of the time of the shortest, for as many tokens a byte.
    letters = random.Random(0)
    words = ["".join(letters.choices(ascii_lowercase, k=80)) for _ in range(100)]
    tokenizer = str(tmp_path / "tokenizer.json")
    train_bpe(words, 600).save(tokenizer)
    limit, size, number = 2**30 // scale, 0, 0
    corpus = tmp_path / "corpus.jsonl"
    with corpus.open("w") as file:
        while size < 4 * limit:
            text = " ".join([str(number), *letters.choices(words, k=50)])
            size += file.write(f'{{"text": "{text}"}}\n')
            number += 1
    result = _run(_BUILD, str(corpus), str(tmp_path / "small"), tokenizer, str(limit), timeout=7000)
    assert result.returncode == 0, result.stderr[-2000:]
    assert int(result.stdout.split()[0]) == number
    if scale > 1:
        layout = {"block_tokens": 65536, "shard_blocks": 512}
        build(text_options(corpus, tmp_path / "free", tokenizer, name="same", workers=2, **layout))
        assert file_hashes(tmp_path / "small") == file_hashes(tmp_path / "free")
