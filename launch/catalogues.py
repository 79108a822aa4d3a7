"""Pairs of English and translated messages from gettext catalogues (`.mo` files): small real data for translation.

Takes a language and folders → pairs, each English message once, in a fixed order. Catalogues come from installed
Python packages and from the machine's own programs. Kept are messages of some words that are translated, on one
line and without a context; what stands for a plural is its singular.
Source: the format of `.mo` files, GNU gettext manual, section 10.3.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

_MAGIC = 0x950412DE
_CHARSET = re.compile(rb"charset=([A-Za-z0-9_.:-]+)")
_CONTEXT, _PLURAL = "\x04", "\x00"
MAX_CHARACTERS = 300


class CatalogueError(ValueError):
    """A file that is no whole catalogue."""


def read_catalogue(data: bytes) -> Iterator[tuple[str, str]]:
    """(message, translation) of a `.mo` file; of plural forms the first each.

    Raises:
        CatalogueError: no such file, or cut off, or in an unknown encoding.
    """
    if len(data) < 20:
        raise CatalogueError("shorter than a header")
    order = "<" if struct.unpack("<I", data[:4])[0] == _MAGIC else ">"
    magic, _, count, originals, translations = struct.unpack(order + "5I", data[:20])
    if magic != _MAGIC:
        raise CatalogueError("does not begin as a catalogue does")

    def entry(table: int, number: int) -> bytes:
        try:
            length, offset = struct.unpack_from(order + "2I", data, table + 8 * number)
        except struct.error:
            raise CatalogueError("its table is cut off") from None
        if offset + length > len(data):
            raise CatalogueError("a message lies behind its end")
        return data[offset : offset + length]

    encoding = "utf-8"
    for number in range(count):
        message, translation = entry(originals, number), entry(translations, number)
        if not message:  # the header, which comes first
            found = _CHARSET.search(translation)
            encoding = found[1].decode() if found else encoding
            continue
        try:
            yield (
                message.decode(encoding).partition(_PLURAL)[0],
                translation.decode(encoding).partition(_PLURAL)[0],
            )
        except (UnicodeDecodeError, LookupError) as error:
            raise CatalogueError(str(error)) from None


def catalogue_files(language: str, folders: Iterable[Path]) -> list[Path]:
    """`.mo` files of a language below the folders, sorted."""
    return sorted({path for folder in folders for path in folder.glob(f"**/{language}/LC_MESSAGES/*.mo")})


def translated_messages(files: Iterable[Path]) -> tuple[list[tuple[str, str]], list[Path]]:
    """Pairs of the files, each English message once (its first translation), and the files that are damaged."""
    pairs: dict[str, str] = {}
    damaged = []
    for path in files:
        try:
            for message, translation in read_catalogue(path.read_bytes()):
                message, translation = message.strip(), translation.strip()
                if _is_kept(message, translation):
                    pairs.setdefault(message, translation)
        except (CatalogueError, OSError):
            damaged.append(path)
    return list(pairs.items()), damaged


def _is_kept(message: str, translation: str) -> bool:
    both = message + translation
    return (
        len(re.findall(r"[A-Za-z]{2,}", message)) >= 2
        and bool(translation)
        and message != translation
        and _CONTEXT not in message
        and "\n" not in both
        and max(len(message), len(translation)) <= MAX_CHARACTERS
    )
