"""What a rank reads of a checkpoint: the pieces that hold its slices, several at once, each told of."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from pretrain.checkpoint import restore, save
from pretrain.checkpoint.digests import CHUNK_BYTES
from pretrain.checkpoint.files import CheckpointFiles, only_in, read_manifest
from pretrain.engine.state import MASTER, Fragment
from pretrain.store.local import LocalStore
from pretrain.topology import World
from tests.checkpoint.flips import Plain

SHAPES = {"first": (6_000_000,), "second": (6_000_000,)}  # 24 MB each, and as much of a moment


class Meeting(LocalStore):
    """Gives pieces of large files only to two who ask at once, and notes what was asked for."""

    def __init__(self, root: str | Path) -> None:
        super().__init__(root)
        self.asked: list[tuple[int, int]] = []
        self._barrier = threading.Barrier(2)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if self.asked:  # the header is asked for by one
            self._barrier.wait(20)
        self.asked.append((start, length))
        return super().get_range(key, start, length)


def test_a_rank_reads_the_pieces_with_its_slices_only_and_several_at_once(tmp_path: Path) -> None:
    source = Plain(1, shapes=SHAPES)
    saving = save(
        LocalStore(tmp_path), source, step=1, attempt=1, training_state={}, world=World(), guard=lambda: None
    )  # fmt: skip
    saving.wait()
    manifest = read_manifest(LocalStore(tmp_path), saving.name)
    store = Meeting(tmp_path / saving.name)
    told: list[int] = []
    files = CheckpointFiles(only_in(store), manifest, 2, lambda: told.append(1))
    # The last third of one tensor of four: 8 of 96 MB, which lie in two pieces.
    wanted = torch.zeros(2_000_000)
    files.plan(wanted, "exp_avg", "first", 4_000_000)
    files.read()
    assert torch.equal(wanted, source.state["first"]["exp_avg"][4_000_000:])
    assert sum(file.bytes for file in manifest.files) > 96_000_000
    header, *pieces = store.asked
    assert header == (0, CHUNK_BYTES)
    assert len({start for start, _ in pieces}) == len(pieces) == len(told) == 2
    assert sum(length for _, length in pieces) <= 2 * CHUNK_BYTES


class Half(Plain):
    """The second of two ranks: it owns the last half of each parameter."""

    def fragments(self) -> list[Fragment]:
        return [
            Fragment(name, self._shapes[name], 3_000_000, {key: value[3_000_000:] for key, value in tensors.items()})
            for name, tensors in self.state.items()
        ]


def test_a_restore_tells_of_each_piece_and_where_it_waits_for_other_ranks(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    source = Plain(1, shapes=SHAPES)
    save(store, source, step=1, attempt=1, training_state={}, world=World(), guard=lambda: None).wait()
    told: list[str] = []
    reader = Half(2, shapes=SHAPES)

    def beat(*, collective: bool = False) -> None:
        told.append("waits" if collective else "goes on")

    restored = restore(store, reader, World(), beat=beat)
    assert restored is not None
    assert all(torch.equal(reader.state[n][k][3_000_000:], source.state[n][k][3_000_000:]) for n in SHAPES
               for k in (MASTER, "exp_avg"))  # fmt: skip
    waits = [index for index, word in enumerate(told) if word == "waits"]
    chosen, planned, read = waits  # for the choice of rank 0, for all plans, for all pieces
    assert chosen >= 1  # the list of checkpoints is a sign of life for each file
    assert planned == chosen + 1
    # Half of 12 pieces, and one more for each tensor whose half begins or ends within a piece.
    assert 6 <= read - planned - 1 <= 10
    assert len(told) == read + 1
