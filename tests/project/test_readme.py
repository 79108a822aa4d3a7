"""What README and docs tell a person to type exists, and the map that README draws is the tree."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from launch.cli import build_parser, parse

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
CLUSTERS = (ROOT / "docs" / "clusters.md").read_text()
PAGES = ["README.md", "CONTRIBUTING.md", "docs/decisions.md", "docs/measurements.md", "docs/clusters.md"]
TYPED = re.compile(r"^(?:\$ )?((?:make|pretrain|python -m|docker|\.venv/bin/python -m) .*)$", re.MULTILINE)


def typed_commands() -> list[str]:
    """Commands in the fenced blocks of README and docs/clusters.md and in the comments at the top of the configs."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", README + CLUSTERS, re.MULTILINE | re.DOTALL)
    commands = [line for block in blocks for line in TYPED.findall(block)]
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        commands += re.findall(r"^# (?:Command|By hand|Make it): +(.*)$", path.read_text(), re.MULTILINE)
    return [re.split(r"\s{2,}[#(]|\s+#\s|\s+>\s|;\s", command)[0].strip().rstrip("&").strip() for command in commands]


@pytest.mark.parametrize("command", sorted(set(typed_commands())))
def test_each_command_that_is_shown_is_accepted(command: str) -> None:
    words = [word for word in shlex.split(command) if word != "…"]
    if words[0] == "pretrain":
        parse(build_parser(), words[1:])
    elif words[0] == "make":
        names = [word for word in words[1:] if "=" not in word]
        subprocess.run(["make", "-n", *names], cwd=ROOT, check=True, capture_output=True, timeout=20)
    elif words[0].endswith("python"):
        module = words[2].replace(".", "/")
        found = [ROOT / f"{module}.py", ROOT / module / "__main__.py"]
        assert words[2] == "pytest" or any(path.exists() for path in found)
    else:
        assert words[0] == "docker"
        mentioned = [word for word in words if word.startswith(("docker/", "configs/"))]
        assert all((ROOT / word).exists() for word in mentioned)


def test_readme_shows_the_two_commands_first() -> None:
    commands = TYPED.findall(README)
    assert commands[0].startswith("make quickstart")
    assert "make test" in README


def test_the_map_in_readme_has_one_line_for_every_folder() -> None:
    ignored = {"__pycache__", "pretrain.egg-info", "build", "dist", "runs", "quickstart", "translation", "wandb"}
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")} - ignored
    for package in ("pretrain", "launch"):
        folders |= {path.name for path in (ROOT / package).iterdir() if path.is_dir()} - ignored
    drawn = re.findall(r"^ *([\w.-]+)/ {2,}\S", README, re.MULTILINE)
    assert sorted(drawn) == sorted(folders)


def test_the_ten_files_to_read_exist() -> None:
    section = README.split("## Ten files", 1)[1].split("\n## ", 1)[0]
    files = re.findall(r"^\d+\. `([^`]+)`", section, re.MULTILINE)
    assert len(files) == 10
    assert [file for file in files if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize("page", PAGES)
def test_no_page_has_a_gap_or_a_dead_link(page: str) -> None:
    text = (ROOT / page).read_text()
    assert re.findall(r"@[A-Z_]+@|TBD|\bXX+\b", text) == []
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), target


def test_every_number_of_the_measured_table_is_in_the_measurements() -> None:
    """A row of README's table is one of docs/measurements.md, so it has a command, a machine and a count of runs."""
    measured = (ROOT / "docs" / "measurements.md").read_text()
    section = README.split("## Measured", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| (?!what|---)([^|]+)\| ([^|]+)\|", section, re.MULTILINE)
    assert rows
    for _, value in rows:
        for number in re.findall(r"\d+(?:[.,]\d+)*", value):
            assert number in measured, number
