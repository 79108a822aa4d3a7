"""A rank's large tensors lie in large pages where the kernel has them, unless its user says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.missing import did_not_run

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import contextlib
from pretrain.__main__ import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(None):
    main(["--help"])
import torch
tensor = torch.ones(2**22)
address = tensor.data_ptr()
inside = False
for line in open("/proc/self/smaps"):
    words = line.split()
    if "-" in words[0] and not words[0].endswith(":"):
        low, high = (int(word, 16) for word in words[0].split("-"))
        inside = low <= address < high
    elif inside and words[0] == "VmFlags:":
        print("hg" in words[1:])
"""


@pytest.mark.parametrize("told", ["", "0"])
def test_a_rank_asks_for_large_pages_unless_it_is_told_not_to(told: str) -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        did_not_run("this kernel has no transparent huge pages")
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    environment |= {"THP_MEM_ALLOC_ENABLE": told} if told else {}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(not told)
