from __future__ import annotations

import random
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data.selection import Selection, identity, is_validation, order_key, selected_texts
from pretrain.data.sources import SourceSpec
from tests.data_build.corpus import numbered_texts, write_jsonl


def _by_sorting(sizes: dict[bytes, int], max_bytes: int) -> set[bytes]:
    """The rule, plainly: smallest identities first until the next does not fit; larger than all is passed over."""
    kept: set[bytes] = set()
    total = 0
    for key in sorted(key for key, size in sizes.items() if size <= max_bytes):
        total += sizes[key]
        if total > max_bytes:
            break
        kept.add(key)
    return kept


@settings(derandomize=True, deadline=None, max_examples=100)
@given(sizes=st.lists(st.integers(1, 50), max_size=30), max_bytes=st.integers(1, 200), seed=st.integers(0, 5))
def test_selection_in_one_pass_keeps_what_sorting_would_keep(sizes: list[int], max_bytes: int, seed: int) -> None:
    documents = {identity(b"%d" % number, None, None): size for number, size in enumerate(sizes)}
    offered = list(documents.items()) * 2  # duplicates count once
    random.Random(seed).shuffle(offered)
    selection = Selection(max_bytes)
    stored = {key for key, size in offered if selection.offer(key, size)}
    kept = {key for key in stored if selection.limit is None or key < selection.limit}
    assert kept == _by_sorting(documents, max_bytes)


def test_no_budget_keeps_everything() -> None:
    selection = Selection(None)
    assert all(selection.offer(identity(b"%d" % n, None, None), 10**9) for n in range(10))
    assert selection.limit is None


def test_identity_tells_sides_and_ordinals_apart() -> None:
    same = [
        identity(b"ab", None, None),
        identity(b"a", b"b", None),
        identity(b"", b"ab", None),
        identity(b"ab", None, 0),
        identity(b"ab", None, 1),
    ]
    assert len(set(same[:3])) == 3
    assert len(set(same[3:])) == 2


def test_hashes_never_change() -> None:
    """Golden: a change would silently reshuffle corpora and move documents across the validation split."""
    key = identity(b"text", b"target", None)
    assert key.hex() == "96727ec6fad0c5984ae425bb1907d9f9"
    assert order_key(key, 7).hex() == "be493e0887f6887b471e418ce1011980"
    assert [n for n in range(40) if is_validation(b"%d" % n, 0.1)] == [5, 36, 37]


def test_the_share_held_out_is_the_fraction() -> None:
    share = sum(is_validation(b"%d" % number, 0.2) for number in range(5000)) / 5000
    assert abs(share - 0.2) < 0.02


def test_texts_for_the_tokenizer_are_those_that_a_build_would_keep(tmp_path: Path) -> None:
    texts = numbered_texts(50)
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts + texts[:5]])
    sizes = {identity(text.encode(), None, None): len(text.encode()) for text in texts}
    expected = _by_sorting(sizes, 1500)
    found = list(selected_texts(SourceSpec((str(path),)), 1500))
    assert [identity(text.encode(), None, None) for text in found] == [key for key in sizes if key in expected]
    assert list(selected_texts(SourceSpec((str(path),)), None)) == texts
