"""`make quickstart`: from the text that every machine has to a trained model, through the commands of the product.

Takes the .py, .rst and .txt files of the running Python and its packages -> `quickstart/` (tokenizer,
shards) and the run `quickstart` (checkpoints, loss plot, sample). Every command is printed before it
runs, so that a person can type it. What exists is not made again.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

from pretrain.errors import ExitCode, PretrainError, UserError
from pretrain.processor import computes_bf16

CONFIG = Path("configs/quickstart.yaml")
RUN = "quickstart"
FOLDER = Path("quickstart")
PROMPT = "def read_lines(path):\n"
NEXT = """\

What to do next
  see the run                          pretrain status quickstart; pretrain checkpoint list quickstart
  interrupt one and go on              pretrain train configs/quickstart.yaml --name second   (Ctrl-C saves and ends)
                                       pretrain resume second
  prove that killing changes nothing   pretrain prove configs/tests/tiny-decoder.yaml model.vocabulary_size=8192 \\
                                       tokenizer=quickstart/tokenizer.json data.sources.text.path=quickstart/data/train
  write more                           pretrain generate quickstart --prompt 'class Queue:' --max-tokens 200
  change the model                     edit configs/quickstart.yaml; pretrain/config/schema.py describes every field
(pretrain is .venv/bin/pretrain)"""


class StepFailedError(PretrainError):
    """One of the commands ended with an error; its own output says which."""

    def __init__(self, command: str, exit_code: int) -> None:
        super().__init__(command, exit_code)
        self.command = command
        self.exit_code = ExitCode(exit_code) if exit_code in set(ExitCode) else ExitCode.FAILED

    def __str__(self) -> str:
        if self.exit_code is ExitCode.INTERRUPTED:
            return f"{self.command} was interrupted. Its state is saved. make quickstart goes on from there."
        return f"{self.command} ended with exit code {int(self.exit_code)}. The reason stands above."


def text_folders() -> list[str]:
    """Standard library and installed packages of the running Python."""
    paths = sysconfig.get_paths()
    return sorted({paths["stdlib"], paths["purelib"], paths["platlib"]})


def reading_options() -> list[str]:
    """Which files are text: Python lets a file name another encoding than UTF-8, those are passed over."""
    patterns = [word for pattern in ("*.py", "*.rst", "*.txt") for word in ("--include", pattern)]
    return [*text_folders(), *patterns, "--invalid-utf8", "skip"]


def run(words: Sequence[str]) -> None:
    """Prints a command of the product and runs it.

    Raises:
        StepFailedError: it ended with another exit code than 0.
    """
    command = shlex.join(("pretrain", *words))
    print(f"\n$ {command}", flush=True)
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "launch.cli", *words])
    while True:
        try:
            exit_code = process.wait()
            break
        except KeyboardInterrupt:
            continue  # the command got the same Ctrl-C and ends in its own way
    if exit_code:
        raise StepFailedError(command, exit_code)
    print(f"({time.monotonic() - start:.0f} s)", flush=True)


def prepare() -> None:
    """Tokenizer and shards, whichever is missing.

    Raises:
        StepFailedError: a command failed.
    """
    tokenizer, data = FOLDER / "tokenizer.json", FOLDER / "data"
    if not tokenizer.exists():
        shutil.rmtree(data, ignore_errors=True)  # shards belong to one tokenizer
        FOLDER.mkdir(exist_ok=True)
        size = ["--vocabulary-size", "8192", "--max-bytes", "8MB"]
        run(["tokenizer", "train", *reading_options(), *size, "--out", str(tokenizer)])
    if not data.exists():
        chosen = ["--max-bytes", "24MB", "--validation-fraction", "0.02"]
        run(["data", "build", *reading_options(), *chosen, "--tokenizer", str(tokenizer), "--out", str(data)])


def precision_here() -> list[str]:
    """An override to fp32 where the processor has no instructions for bf16, which is then twenty times slower."""
    if computes_bf16():
        return []
    print("\nThis processor has no instructions for bf16: the run computes in fp32.", flush=True)
    return ["engine.precision=fp32"]


def train() -> None:
    """The run, from where it stands, and its loss plot.

    Raises:
        StepFailedError: it failed or was interrupted.
        PretrainError: its metrics cannot be read.
    """
    from pretrain.metrics.plot import plot_losses
    from pretrain.rundir import RunDirectory

    run(["train", str(CONFIG), *precision_here(), "--name", RUN, "--resume", "auto"])
    directory = RunDirectory.locate(RUN)
    print(f"\nloss curve  {plot_losses(directory, Path(directory.url) / 'plots' / 'loss.png')}", flush=True)


def main() -> int:
    """The whole journey; gives an exit code."""
    start = time.monotonic()
    try:
        if not CONFIG.exists():
            raise UserError(f"{CONFIG} is not here. The quickstart runs in the repository's root. Go there.")
        prepare()
        train()
        run(["generate", RUN, "--prompt", PROMPT, "--max-tokens", "120", "--temperature", "0.8", "--seed", "1"])
    except PretrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    print(f"{NEXT}\n\ndone in {time.monotonic() - start:.0f} s")
    return int(ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main())
