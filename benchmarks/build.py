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

from benchmarks.result import Result, interleave, median, median_ratio
from pretrain.data.build import BuildOptions, build
from pretrain.data.sources import SourceSpec
from pretrain.data.tokenizer import Tokenizer, train_bpe

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


def cpu_s() -> float:
    """CPU seconds of this process, its threads, and its children that have ended."""
    return sum(os.times()[:4])


def bare_mb_per_s(tokenizer: Tokenizer, texts: list[str], clock: Callable[[], float] = time.perf_counter) -> float:
    """MB/s of `encode_batch_fast`, a thousand texts at a time (fewer where they are long)."""
    encode = tokenizer.bare_encoder()
    num_bytes = sum(len(text.encode()) for text in texts)
    at_once = max(1, min(1000, 2**20 * len(texts) // num_bytes))
    rest = iter(texts)
    started = clock()
    while batch := list(islice(rest, at_once)):
        encode(batch, add_special_tokens=False)
    return num_bytes / 1e6 / (clock() - started)


def build_mb_per_s(
    corpus: Path, tokenizer: Path, num_bytes: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """MB/s of a whole build, from the start of its workers to the published source."""
    out = corpus.with_name("out")
    started = clock()
    build(BuildOptions(SourceSpec((str(corpus),)), str(out), str(tokenizer), workers=THREADS))
    elapsed = clock() - started
    shutil.rmtree(out)
    return num_bytes / 1e6 / elapsed


def measure(*, quick: bool, command: str) -> list[Result]:
    """Ratio per kind of text; MB/s on prose."""
    num_bytes, repetitions = (4 * 10**6, 2) if quick else (30 * 10**6, 3)
    results = []
    os.environ.update(TOKENIZERS_PARALLELISM="true", RAYON_NUM_THREADS=str(THREADS))
    with tempfile.TemporaryDirectory() as folder:
        kinds = {kind: texts_of(kind, num_bytes) for kind in _FILES}
        sample = [text for texts in kinds.values() for text in texts[:: max(1, num_bytes // SAMPLE_BYTES)]]
        path = Path(folder, "tokenizer.json")
        train_bpe(sample, VOCABULARY).save(path)
        tokenizer = Tokenizer.load(path)
        for kind, texts in kinds.items():
            corpus = Path(folder, kind)
            write_corpus(corpus, texts)
            size = sum(len(text.encode()) for text in texts)
            for suffix, clock in (("", time.perf_counter), ("_cpu", cpu_s)):
                values = interleave(
                    {
                        "ours": partial(build_mb_per_s, corpus, path, size, clock),
                        "bare": partial(bare_mb_per_s, tokenizer, texts, clock),
                    },
                    repetitions,
                )
                name = "build.vs_encode_batch_fast" if kind == "prose" else f"build.{kind}_vs_encode_batch_fast"
                ratio, bare = median_ratio(values["ours"], values["bare"]), median(values["bare"])
                baseline = f"encode_batch_fast, {THREADS} threads, MB/{'CPU ' if suffix else ''}s"
                results.append(Result(name + suffix, ratio, "ratio", baseline, bare, repetitions, command))
                if kind == "prose":
                    ours = median(values["ours"])
                    results.append(Result(f"build.mb_per_s{suffix}", ours, "MB/s", "", None, repetitions, command))
    return results
