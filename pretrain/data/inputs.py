"""Names of raw inputs -> the files to read, local or remote, decompressed while they are read.

Takes files, directories, globs, braces and URLs -> gives `InputFile`s, each once, in a fixed order.
Inputs are raw material outside any store; remote ones go through fsspec.
Invariants: a name that matches nothing is an error; an existing path, and an existing folder that a pattern
begins with, is taken literally, whatever characters it holds; a compressed file that ends early is an error,
never just shorter.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from pretrain.config.units import mask_password
from pretrain.data.documents import Format, SourceSpec
from pretrain.data.remote_input import RemoteFile, expand_remote
from pretrain.data.zstd import ZstdFile
from pretrain.errors import DataError, PretrainError, StoreError

SUFFIXES: dict[Format, tuple[str, ...]] = {
    "text": (".txt", ".md", ".rst", ".py"),
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "tar": (".tar",),
}
COMPRESSED = (".gz", ".zst")
_TABLES = ("parquet", "arrow")  # they need random access and compress inside
_MAX_BRACES = 100_000
_COMPRESSION_RATIO = 4  # text over its gzip, roughly


class InputFile(NamedTuple):
    """One file to read.

    Attributes:
        origin: path or URL.
        size: bytes; 0 where a server does not say.
        stamp: changes when the file does: its times, or what a server says of its version.
    """

    origin: str
    size: int
    stamp: str = ""

    @property
    def name(self) -> str:
        return self.origin.rpartition("/")[2]

    @property
    def is_remote(self) -> bool:
        return "://" in self.origin

    def check_unchanged(self) -> None:
        """Raises DataError if a local file is no longer the one that was listed."""
        if not self.is_remote and self.stamp:
            now = _local(Path(self.origin))
            if now != self:
                raise DataError(
                    f"{self.origin} has changed while it was read ({self.size} -> {now.size} bytes). A build reads "
                    "what does not change. Start it again."
                )

    @property
    def text_bytes(self) -> int:
        """About how much text it holds."""
        return self.size * (_COMPRESSION_RATIO if self.name.endswith((*COMPRESSED, ".parquet")) else 1)

    @contextmanager
    def open(self) -> Iterator[io.BufferedIOBase]:
        """The content, decompressed; every failure to read it names the file.

        Raises:
            DataError: missing, unreadable, or damaged as a compressed file.
            StoreError: a server failed.
        """
        try:
            with self._open_raw() as raw:
                if self.name.endswith(".gz"):
                    with gzip.GzipFile(fileobj=raw) as file:
                        yield file
                elif self.name.endswith(".zst"):
                    with io.BufferedReader(ZstdFile(raw, self.origin)) as buffered:
                        yield buffered
                else:
                    yield raw
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{self.origin} is damaged: {error}. Get the file again.") from None
        except PretrainError:
            raise
        except OSError as error:
            if self.is_remote:
                raise StoreError(f"{self.origin} cannot be read: {error}. Check the network and the URL.") from None
            raise DataError(
                f"{self.origin} cannot be read: {error.strerror or error}. Correct the path or its permissions."
            ) from None

    def _open_raw(self) -> io.BufferedIOBase:
        if self.is_remote:
            return RemoteFile.open(self.origin)
        return open(self.origin, "rb")


def list_files(spec: SourceSpec) -> list[InputFile]:
    """The files of a spec, each once, in reading order.

    Raises:
        DataError: an input names nothing or holds a password, or a directory holds no fitting file.
        StoreError: a server failed.
    """
    files: dict[str, InputFile] = {}
    for given in spec.inputs:
        if (masked := mask_password(given)) != given:
            raise DataError(
                f"input {masked!r} holds a password. Shards keep the file of every document, and it with it. Take it "
                "out of the URL and into the environment (for s3://, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY); "
                "over HTTP download the files first."
            )
        folder = _literal_folder(given)
        for name in (folder + rest for rest in expand_braces(given[len(folder) :])):
            for file in _files_of(name, given, spec):
                files.setdefault(file.origin, file)
    return list(files.values())


def expand_braces(pattern: str) -> list[str]:
    """`a{b,c}` -> ab, ac; `s-{08..10}` -> s-08, s-09, s-10; other braces stay as they are.

    Raises:
        DataError: a range that runs backwards or gives very many names.
    """
    for match in re.finditer(r"\{([^{}]*)\}", pattern):
        inner = match[1]
        numbers = re.fullmatch(r"(\d+)\.\.(\d+)", inner)
        if numbers:
            first, last = int(numbers[1]), int(numbers[2])
            if not 0 <= last - first <= _MAX_BRACES:
                raise DataError(
                    f"input {pattern!r} expands to {last - first + 1} names. A range runs upwards over at most "
                    f"{_MAX_BRACES}. Correct {{{inner}}}, or give a directory or a glob."
                )
            choices = [str(value).zfill(len(numbers[1])) for value in range(first, last + 1)]
        elif "," in inner:
            choices = inner.split(",")
        else:
            continue
        head, tail = pattern[: match.start()], pattern[match.end() :]
        return [text for choice in choices for text in expand_braces(head + choice + tail)]
    return [pattern]


def format_of(file: InputFile, spec: SourceSpec) -> Format:
    """What reads the file.

    Raises:
        DataError: nobody can tell, or it cannot hold what the spec asks for.
    """
    found = spec.format if spec.format != "auto" else _format_by_suffix(file.name)
    if found is None and any(fnmatch(file.name, pattern) for pattern in spec.include):
        found = "text"
    if spec.pairs and found in (None, "text"):
        raise DataError(
            f"{file.origin} is not JSON lines. Pairs are read from records with two fields. "
            "Give --format jsonl if it is one."
        )
    if found is None:
        raise DataError(f"format=auto cannot tell what {file.origin} is. Give --format text or --format jsonl.")
    if found in _TABLES and file.name.endswith(COMPRESSED):
        raise DataError(f"{file.origin} is compressed as a whole. {found} compresses inside. Decompress the file.")
    return found


def _format_by_suffix(name: str) -> Format | None:
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return next((kind for kind, suffixes in SUFFIXES.items() if name.endswith(suffixes)), None)


def _files_of(name: str, given: str, spec: SourceSpec) -> list[InputFile]:
    if "://" in name and not name.startswith("file://"):
        found = expand_remote(name, lambda base: _fits(base, spec))
        files = [InputFile(*item) for item in found]
    else:
        files = [_local(path) for path in _paths_of(Path(name.removeprefix("file://")), name, spec)]
    if not files:
        expanded = "" if name == given else f" (from {given!r})"
        raise DataError(f"input {name!r}{expanded} matches no file. Give files, directories or a pattern that matches.")
    return files


def _local(path: Path) -> InputFile:
    try:
        status = path.stat()
        return InputFile(path.as_posix(), status.st_size, f"{status.st_mtime_ns} {status.st_ctime_ns}")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Correct the path or its permissions.") from None


def _paths_of(path: Path, name: str, spec: SourceSpec) -> list[Path]:
    if path.is_dir():
        found = _saved_dataset(path) or _walk(path, spec)
        if not found:
            wanted = ", ".join(spec.include or _known_suffixes(spec))
            raise DataError(
                f"input {name!r} holds no fitting file ({wanted}). Name other files with --include '*.ext'."
            )
        return found
    if path.exists():
        return [path]
    pattern = str(path)
    folder = _literal_folder(pattern)
    matches = glob.glob(glob.escape(folder) + pattern[len(folder) :], recursive=True)
    return [match for match in map(Path, sorted(matches)) if match.is_file()]


def _literal_folder(name: str) -> str:
    """What exists as it is written: the whole name, or the folders that it begins with, slash included."""
    while name and not os.path.exists(name):
        name = name[: name.rstrip("/").rfind("/") + 1]
    return name


def _saved_dataset(directory: Path) -> list[Path]:
    """The arrow files of a directory that `datasets.save_to_disk` wrote, in their order; [] for any other."""
    several, single = directory / "dataset_dict.json", directory / "state.json"
    try:
        if several.is_file():
            splits = json.loads(several.read_bytes())["splits"]
            if len(splits) != 1:
                raise DataError(
                    f"{directory} holds the splits {', '.join(splits)}. Splits are never mixed silently. "
                    f"Name those to read, such as {directory / splits[0]}."
                )
            return _saved_dataset(directory / splits[0])
        if not single.is_file() or not (directory / "dataset_info.json").is_file():
            return []
        state = json.loads(single.read_bytes())
        if state.get("_indices_files"):
            raise DataError(
                f"{directory} is a selection over its arrow files, not the rows themselves. Such files are not read. "
                "Save it again with `dataset.flatten_indices().save_to_disk(...)`."
            )
        return [directory / item["filename"] for item in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{directory} is a damaged saved dataset ({error!r}). Save it again.") from None


def _walk(directory: Path, spec: SourceSpec) -> list[Path]:
    """Fitting files below a directory, sorted; hidden ones and links to directories are left out."""

    def failed(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}. Correct its permissions.") from None

    found = []
    for root, folders, names in os.walk(directory, onerror=failed):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(root, name) for name in names if not name.startswith(".") and _fits(name, spec)]
    return sorted(path for path in found if path.is_file())


def _known_suffixes(spec: SourceSpec) -> tuple[str, ...]:
    if spec.format == "auto":
        return tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
    return SUFFIXES[spec.format]


def _fits(name: str, spec: SourceSpec) -> bool:
    if spec.include:
        return any(fnmatch(name, pattern) for pattern in spec.include)
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return name.endswith(_known_suffixes(spec))
