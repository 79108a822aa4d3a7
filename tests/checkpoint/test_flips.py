"""Flipped bits anywhere in a checkpoint are found before a weight is used."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint.flips import campaign


def test_every_flipped_bit_is_found_before_a_weight_is_used(tmp_path: Path) -> None:
    found = campaign(tmp_path, flips=40, seed=7)
    assert sum(found.values()) == 40
    assert found["rank-00000.safetensors: refused"] > 20
    assert found["MANIFEST.json: refused"]
