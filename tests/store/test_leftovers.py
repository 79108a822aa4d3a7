"""What killed writers leave goes at the next start; what somebody still writes stays."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from pretrain.store import make_scratch, open_store, remove_leftovers
from pretrain.store.leftovers import OLDEST_WRITE_S, sweep_scratch, temporary_name

ROOT = Path(__file__).resolve().parents[2]
WRITER = (
    "import sys, time\n"
    "from pretrain.store import open_store\n"
    "def chunks():\n"
    "    yield b'half'\n"
    "    print('half', flush=True)\n"
    "    time.sleep(60)\n"
    "open_store(sys.argv[1]).put_stream('deep/file', chunks())\n"
)


def test_a_half_written_file_goes_when_its_writer_is_dead_and_not_before(tmp_path: Path) -> None:
    store = open_store(tmp_path / "run")
    store.put("kept", b"x")
    writer = subprocess.Popen([sys.executable, "-c", WRITER, store.url], stdout=subprocess.PIPE, cwd=ROOT)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"half\n"
    try:
        assert remove_leftovers(store) == []
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    (removed,) = remove_leftovers(store)
    assert removed.startswith("deep/.tmp-file-")
    assert [path.name for path in (tmp_path / "run").rglob("*") if path.is_file()] == ["kept"]


def test_of_another_machine_only_what_is_older_than_any_write_goes(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    parts = temporary_name("a-b").split("-")
    young, old = tmp_path / "-".join([*parts[:-3], "elsewhere", "1", "x"]), tmp_path / ".tmp-old-1-abc"
    for path in (young, old):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - OLDEST_WRITE_S - 1,) * 2)
    assert remove_leftovers(store) == [old.name]
    assert young.exists()


def test_a_scratch_folder_of_a_killed_process_goes_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = "import sys\nfrom pretrain.store import make_scratch\nprint(make_scratch('test'))\n"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=environment, check=True
    )
    left = Path(done.stdout.strip())
    assert left.parent == tmp_path
    assert left.is_dir()
    mine = make_scratch("test")
    assert [path.name for path in tmp_path.iterdir()] == [mine.name]
    assert oct(mine.stat().st_mode)[-3:] == "700"
    assert sweep_scratch("test") == []


def test_an_object_store_has_no_half_written_files() -> None:
    assert remove_leftovers(open_store("memory://leftovers")) == []
