"""The tree is the map: sizes, docstrings, the Makefile's targets and what CI runs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pretrain", "launch", "benchmarks", "tests")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MODULES = [path for path in FILES if path.is_relative_to(ROOT / "pretrain") or path.is_relative_to(ROOT / "launch")]
TARGETS = [
    "help",
    "install",
    "quickstart",
    "quickstart-translation",
    "test",
    "test-cluster",
    "check",
    "bench",
    "docs",
    "image",
    "clean",
]


def test_no_file_is_over_600_lines_and_no_module_over_400() -> None:
    lines = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in FILES}
    assert {path: count for path, count in lines.items() if count > 600} == {}
    assert {path: count for path, count in lines.items() if count > 400 and path.parts[0] != "tests"} == {}


def test_no_function_is_over_60_lines() -> None:
    long = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                count = node.end_lineno - node.lineno + 1
                if count > 60:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} {count}")
    assert long == []


def test_every_module_says_its_duty_in_at_most_15_lines() -> None:
    wrong = []
    for path in MODULES:
        text = ast.get_docstring(ast.parse(path.read_text()))
        if text is None and path.read_text().strip():
            wrong.append(f"{path.relative_to(ROOT)} has none")
        elif text and len(text.splitlines()) > 15 and path != ROOT / "pretrain/model/__init__.py":
            wrong.append(f"{path.relative_to(ROOT)} has {len(text.splitlines())} lines")
    assert wrong == []


def test_make_has_exactly_the_targets_of_the_contract() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony
    assert phony[1].split() == TARGETS
    described = re.findall(r"^([a-z-]+):[^\n]*##", makefile, re.MULTILINE)
    assert sorted(described) == sorted(TARGETS)


def test_make_help_names_every_target() -> None:
    result = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert result.returncode == 0, result.stderr
    assert re.findall(r"^  make (\S+)", result.stdout, re.MULTILINE) == TARGETS


def test_make_install_does_nothing_when_it_is_up_to_date(tmp_path: Path) -> None:
    """The stamp depends on the two files that say what is installed, and on nothing else."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()

    def would_run() -> str:
        return subprocess.run(
            ["make", "-n", "install"], cwd=tmp_path, capture_output=True, text=True, timeout=20, check=True
        ).stdout

    assert "pip install" not in would_run()
    for name in ("pyproject.toml", "constraints.txt"):
        stamp = (tmp_path / ".venv" / ".installed").stat().st_mtime_ns
        os.utime(tmp_path / name, ns=(stamp + 10**9, stamp + 10**9))
        assert "pip install" in would_run()
        os.utime(tmp_path / name, ns=(stamp - 10**9, stamp - 10**9))


def test_ci_runs_make_test_and_passes_its_exit_code_on(tmp_path: Path) -> None:
    fake = tmp_path / "make"
    fake.write_text('#!/bin/sh\necho "make $*"\nexit 7\n')
    fake.chmod(0o755)
    result = subprocess.run(
        ["bash", str(ROOT / ".ci/run")],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert result.stdout == "make test\n"
    assert result.returncode == 7


@pytest.mark.parametrize("name", ["LICENSE", "README.md", "CONTRIBUTING.md", "constraints.txt", "docs/decisions.md"])
def test_what_the_tree_promises_is_there(name: str) -> None:
    assert (ROOT / name).stat().st_size > 500
