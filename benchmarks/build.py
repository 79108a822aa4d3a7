"""Building: text to shards against bare `encode_batch_fast` of the same texts on as many threads.

Ours reads compressed JSON lines, hashes, sorts, drops duplicates, tokenises, packs and writes; the baseline has the
texts in memory and throws the ids away. The corpus comes as eight files: of one compressed file, reading cannot be
shared. 30 MB of a kind, so that starting the workers is some hundredths of the time. Prose (about 100 tokens a
document), code (about 4,000) and short texts (10): `prose.en`, `code.python` and the English sides of `en-de.train`
(.jsonl.gz) in the folder PRETRAIN_CORPORA, or else what Python's standard library holds: docstrings, modules, and
lines of docstrings.
"""

from __future__ import annotations

import ast
import gzip
import json
import os
import shutil
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import tokenizers

from benchmarks.result import Result, interleave, median, median_ratio
from pretrain.data.build import BuildOptions, build
from pretrain.data.sources import SourceSpec
from pretrain.data.tokenizer import train_bpe

THREADS = 2
VOCABULARY = 16384
SAMPLE_BYTES = 2 * 10**6  # of each kind, for the tokenizer
FILES = 8
_FILES = {"prose": ("prose.en", "text"), "code": ("code.python", "text"), "short": ("en-de.train", "en")}


def texts_of(kind: str, num_bytes: int) -> list[str]:
    """Different texts of one kind, about so many bytes of them, or all there are."""
    found: dict[str, None] = {}
    size = 0
    for text in _texts(kind):
        if text.strip() and text not in found:
            found[text] = None
            size += len(text.encode())
            if size >= num_bytes:
                break
    return list(found)


def _texts(kind: str) -> Iterator[str]:
    folder = os.environ.get("PRETRAIN_CORPORA")
    if folder:
        name, field = _FILES[kind]
        with gzip.open(Path(folder, f"{name}.jsonl.gz"), "rt", encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)[field]
        return
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        if kind == "code":
            yield text
            continue
        for docstring in _docstrings(text):
            yield from docstring.splitlines() if kind == "short" else [docstring]


def _docstrings(source: str) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""


def write_corpus(folder: Path, texts: list[str]) -> None:
    """The texts as files of compressed JSON lines."""
    folder.mkdir()
    for number in range(FILES):
        with gzip.open(folder / f"{number}.jsonl.gz", "wt", compresslevel=3, encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts[number::FILES])


class Rates(NamedTuple):
    """MB of text per second of the wall and per second of CPU."""

    wall: float
    cpu: float


def rates(action: Callable[[], object], num_bytes: int) -> Rates:
    """Of one pass over so many bytes; CPU seconds are this process's, its threads' and its ended children's."""
    wall, cpu = time.perf_counter(), sum(os.times()[:4])
    action()
    return Rates(num_bytes / 1e6 / (time.perf_counter() - wall), num_bytes / 1e6 / (sum(os.times()[:4]) - cpu))


def encode_all(tokenizer: Path, texts: list[str]) -> None:
    """`encode_batch_fast` as the library comes, a thousand texts at a time (fewer where they are long)."""
    encode = tokenizers.Tokenizer.from_file(str(tokenizer)).encode_batch_fast
    at_once = max(1, min(1000, 2**20 * len(texts) // sum(map(len, texts))))
    rest = iter(texts)
    while batch := list(islice(rest, at_once)):
        encode(batch, add_special_tokens=False)


def build_all(corpus: Path, tokenizer: Path) -> None:
    """A whole build, from the start of its workers to the published source."""
    out = corpus.with_name("out")
    build(BuildOptions(SourceSpec((str(corpus),)), str(out), str(tokenizer), workers=THREADS))
    shutil.rmtree(out)


def measure(*, quick: bool, command: str) -> list[Result]:
    """Ratio per kind of text, by the wall and by CPU time; MB/s on prose."""
    num_bytes, repetitions = (4 * 10**6, 2) if quick else (30 * 10**6, 5)
    results = []
    os.environ.update(TOKENIZERS_PARALLELISM="true", RAYON_NUM_THREADS=str(THREADS))
    with tempfile.TemporaryDirectory() as folder:
        kinds = {kind: texts_of(kind, num_bytes) for kind in _FILES}
        sample = [text for texts in kinds.values() for text in texts[:: max(1, num_bytes // SAMPLE_BYTES)]]
        path = Path(folder, "tokenizer.json")
        train_bpe(sample, VOCABULARY).save(path)
        for kind, texts in kinds.items():
            corpus = Path(folder, kind)
            write_corpus(corpus, texts)
            size = sum(len(text.encode()) for text in texts)
            sides = {"ours": partial(build_all, corpus, path), "bare": partial(encode_all, path, texts)}
            values = interleave({name: partial(rates, side, size) for name, side in sides.items()}, repetitions)
            name = "build.vs_encode_batch_fast" if kind == "prose" else f"build.{kind}_vs_encode_batch_fast"
            for place, suffix in enumerate(("", "_cpu")):
                ours, bare = ([value[place] for value in values[side]] for side in ("ours", "bare"))
                baseline = f"encode_batch_fast, {THREADS} threads, MB/{'CPU ' if suffix else ''}s"
                ratio = median_ratio(ours, bare)
                results.append(Result(name + suffix, ratio, "ratio", baseline, median(bare), repetitions, command))
                if kind == "prose":
                    metric = f"build.mb_per_s{suffix}"
                    results.append(Result(metric, median(ours), "MB/s", "", None, repetitions, command))
    return results
