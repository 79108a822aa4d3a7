"""Import contracts hold, and the checker that says so would notice a broken one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("lint-imports")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [str(program), "--no-cache"], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )


def test_the_import_contracts_hold() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout


def test_a_room_that_imports_upwards_would_be_found(tmp_path: Path) -> None:
    for name in ("pretrain", "launch", "pyproject.toml"):
        source = ROOT / name
        for path in [source] if source.is_file() else source.rglob("*.py"):
            target = tmp_path / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(path.read_text())
    guilty = tmp_path / "pretrain" / "loss" / "sums.py"
    guilty.write_text(guilty.read_text() + "\nimport ray\n")
    result = lint_imports(tmp_path)
    assert result.returncode != 0
    assert "pretrain never imports launch BROKEN" in result.stdout
