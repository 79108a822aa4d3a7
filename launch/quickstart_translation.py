"""`make quickstart-translation`: from the messages of installed programs to a model that translates them.

Takes the German catalogues of the packages of `pretrain[translation]` and of this machine → `translation/` (pairs,
tokenizer, shards) and the run `translation`; then translates messages that were held out, and scores them. Every
command is printed before it runs. What exists is not made again. Held out is decided by the English text
alone, so that nothing held out was trained on.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import time
from pathlib import Path

from launch.catalogues import catalogue_files, translated_messages
from launch.quickstart import run
from pretrain.data.selection import is_validation
from pretrain.errors import ExitCode, PretrainError, UserError

CONFIG = Path("configs/translation-small.yaml")
RUN = "translation"
FOLDER = Path("translation")
LANGUAGE = "de"
HELD_OUT = 0.05
LEAST_PAIRS = 2000
MACHINE_FOLDERS = (Path("/usr/share/locale"),)
_FIELDS = ["--source-field", "source", "--target-field", "target"]


def write_pairs(folder: Path, folders: list[Path]) -> tuple[int, int]:
    """Writes train.jsonl and heldout.jsonl; gives how many pairs each has.

    Raises:
        UserError: too few messages to learn anything from.
    """
    pairs, damaged = translated_messages(catalogue_files(LANGUAGE, folders))
    for path in damaged:
        print(f"left out: {path} is damaged or in an unknown encoding")
    if len(pairs) < LEAST_PAIRS:
        raise UserError(
            f"only {len(pairs)} translated messages were found in {', '.join(map(str, folders))}. A model needs at "
            f"least {LEAST_PAIRS}. Install pretrain[translation], which brings packages with German catalogues."
        )
    files = {name: (folder / f"{name}.jsonl").open("w", encoding="utf-8") for name in ("train", "heldout")}
    counts = dict.fromkeys(files, 0)
    for message, translation in pairs:
        name = "heldout" if is_validation(message.encode(), HELD_OUT) else "train"
        files[name].write(json.dumps({"source": message, "target": translation}, ensure_ascii=False) + "\n")
        counts[name] += 1
    for file in files.values():
        file.close()
    return counts["train"], counts["heldout"]


def prepare() -> None:
    """Pairs, tokenizer and shards, whichever is missing.

    Raises:
        UserError: too few messages.
        PretrainError: a command failed.
    """
    FOLDER.mkdir(exist_ok=True)
    train, heldout, tokenizer = FOLDER / "train.jsonl", FOLDER / "heldout.jsonl", FOLDER / "tokenizer.json"
    if not tokenizer.exists():
        paths = sysconfig.get_paths()
        packages = sorted({Path(paths["purelib"]), Path(paths["platlib"])})
        counts = write_pairs(FOLDER, [*packages, *MACHINE_FOLDERS])
        print(f"{counts[0]:,} pairs to train on, {counts[1]:,} held out")
        run(["tokenizer", "train", str(train), *_FIELDS, "--vocabulary-size", "4096", "--out", str(tokenizer)])
    for name, source in (("train", train), ("heldout", heldout)):
        out = FOLDER / "data" / name
        if not out.exists():
            sizes = ["--source-length", "256", "--target-length", "256", "--rows-per-block", "16"]
            built = ["--tokenizer", str(tokenizer), "--out", str(out)]
            run(["data", "build", str(source), *_FIELDS, *built, *sizes])


def main() -> int:
    """The whole journey; gives an exit code."""
    start = time.monotonic()
    try:
        if not CONFIG.exists():
            raise UserError(f"{CONFIG} is not here. The quickstart runs in the repository's root. Go there.")
        prepare()
        run(["train", str(CONFIG), "--name", RUN, "--resume", "auto"])
        kept = ["--samples", str(FOLDER / "translations.jsonl"), "--show", "8"]
        pairs = ["--pairs", str(FOLDER / "heldout.jsonl"), "--max-pairs", "400", "--max-tokens", "100"]
        run(["evaluate", RUN, "--average", "3", *pairs, "--beams", "4", *kept])
    except PretrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    print(
        f"\ntranslate more: pretrain generate {RUN} --source 'The file could not be opened.' --beams 4\n"
        f"done in {time.monotonic() - start:.0f} s"
    )
    return int(ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main())
