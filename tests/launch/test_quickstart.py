"""The quickstart on processors without instructions for bf16."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.quickstart import precision_here


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags\t\t: fpu avx avx2", ["engine.precision=fp32"]),
        ("flags\t\t: fpu avx512f avx512_bf16", []),
        ("flags\t\t: fpu amx_bf16 amx_tile", []),
        ("Features\t: fp asimd bf16", []),
    ],
)
def test_a_processor_without_bf16_computes_in_fp32(
    flags: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: flags)
    assert precision_here() == expected
    assert ("no instructions for bf16" in capsys.readouterr().out) == bool(expected)
