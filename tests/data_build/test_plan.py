"""How the files of a build are shared out."""

from __future__ import annotations

import pytest

from pretrain.data.build import BuildOptions
from pretrain.data.build_plan import make_plan
from pretrain.data.inputs import InputFile
from pretrain.data.sources import SourceSpec
from pretrain.data.tokenizer import Tokenizer

MB = 2**20


@pytest.mark.parametrize(
    ("sizes", "pieces"),
    [
        ([MB // 100] * 50, 1),  # not worth two tasks
        ([4 * MB] * 8, 8),  # less than a piece of a large corpus: still a task for each worker
        ([MB] * 64, 16),
        ([64 * MB] * 40, 40),
        ([MB] * 6400, 100),  # of 64 MB
        ([300 * MB, 1, 1], 2),  # a file is never cut
    ],
)
def test_neighbouring_files_make_pieces_that_are_worth_a_task_and_enough_of_them(
    sizes: list[int], pieces: int, tokenizer: Tokenizer, tokenizer_path: str
) -> None:
    files = [InputFile(f"/in/{number}.jsonl", size) for number, size in enumerate(sizes)]
    plan = make_plan(BuildOptions(SourceSpec(("/in",)), "/out", tokenizer_path), files, tokenizer)
    assert len(plan.pieces) == pieces
    assert [number for piece in plan.pieces for number in piece] == list(range(len(files)))
