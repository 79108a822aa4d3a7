"""One cache directory under several ranks of a node, some of them killed: whole blocks or none, within its budget."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pretrain.data.cache import BlockCache

SIZE, KEYS = 19_200, 40
BUDGET = 20 * SIZE

_RANK = """
import hashlib, os, random, signal, sys
from pathlib import Path
from pretrain.data.cache import BlockCache
directory, seed, last_put = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
cache, pick, puts = BlockCache(directory, int(sys.argv[4])), random.Random(seed), 0
replace = Path.replace
def dying(path, target):
    if puts == last_put:
        os.kill(os.getpid(), signal.SIGKILL)  # written, not renamed
    return replace(path, target)
Path.replace = dying
for _ in range(600):
    key = f"{pick.randrange(int(sys.argv[5])):02d}key"
    whole = hashlib.sha256(key.encode()).digest() * 600
    found = cache.get(key)
    assert found is None or found == whole, key
    if found is None:
        puts += 1
        cache.put(key, whole)
print(puts)
"""


def test_ranks_share_a_cache_and_one_that_is_killed_in_mid_write_harms_none(tmp_path: Path) -> None:
    begun = [
        subprocess.Popen([sys.executable, "-c", _RANK, str(tmp_path), *map(str, (seed, last, BUDGET, KEYS))],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for seed, last in ((1, 0), (2, 0), (3, 60))
    ]  # fmt: skip
    ended = [process.communicate(timeout=60) for process in begun]
    assert [process.returncode for process in begun] == [0, 0, -signal.SIGKILL], ended
    assert all(not errors for _, errors in ended[:2])  # none says that the cache takes no more blocks
    assert all(20 < int(output) < 600 for output, _ in ended[:2]), "blocks were taken from it, and were missing"
    (half,) = tmp_path.glob("*/*.block.*")
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*.block")) <= BUDGET * (1 + 3 / 20)
    os.utime(half, (time.time() - 3600,) * 2)
    BlockCache(tmp_path, BUDGET).put("99key", bytes(SIZE))
    assert not half.exists()


def test_what_another_rank_is_writing_is_never_the_block_that_must_go(tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    writing = tmp_path / "ab" / "abc.block.77-other"
    writing.write_bytes(bytes(100))
    os.utime(writing, (time.time() - 60,) * 2)  # older than every block, on a slow disk
    cache = BlockCache(tmp_path, 1000)
    for number in range(30):
        cache.put(f"{number:02d}key", bytes(100))
    writing.replace(tmp_path / "ab" / "abc.block")
    assert cache.get("abc") == bytes(100)
