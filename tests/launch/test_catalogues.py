"""Messages of catalogues against Python's own gettext, and what damaged files do."""

from __future__ import annotations

import gettext
import io
import struct
from pathlib import Path

import pytest

from launch.catalogues import CatalogueError, catalogue_files, read_catalogue, translated_messages
from launch.quickstart_translation import write_pairs
from pretrain.errors import UserError

MESSAGES = {
    "": "Content-Type: text/plain; charset={}\n",
    "Open the file": "Datei öffnen",
    "%d file was found\x00%d files were found": "%d Datei gefunden\x00%d Dateien gefunden",
    "menu\x04Save all": "Alle speichern",
    "Cancel": "Abbrechen",
    "The same text": "The same text",
    "Two lines\nof text": "Zwei Zeilen\nText",
}


def catalogue(messages: dict[str, str], *, order: str = "<", charset: str = "utf-8") -> bytes:
    """A `.mo` file by the manual: header, two tables of (length, offset), then the strings, sorted."""
    pairs = sorted(
        (k.encode(charset), v.format(charset).encode(charset) if not k else v.encode(charset))
        for k, v in messages.items()
    )
    at = 28 + 16 * len(pairs)
    tables, strings = [b"", b""], b""
    for side in (0, 1):
        for pair in pairs:
            tables[side] += struct.pack(order + "2I", len(pair[side]), at + len(strings))
            strings += pair[side] + b"\0"
    head = struct.pack(order + "7I", 0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, 0)
    return head + tables[0] + tables[1] + strings


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("charset", ["utf-8", "iso-8859-1"])
def test_messages_are_those_that_gettext_reads(order: str, charset: str) -> None:
    data = catalogue(MESSAGES, order=order, charset=charset)
    theirs = gettext.GNUTranslations(io.BytesIO(data))
    found = dict(read_catalogue(data))
    assert found["Open the file"] == theirs.gettext("Open the file") == "Datei öffnen"
    assert found["%d file was found"] == theirs.ngettext("%d file was found", "%d files were found", 1)
    assert len(found) == len(MESSAGES) - 1


def test_a_file_cut_anywhere_is_damaged_and_named(tmp_path: Path) -> None:
    whole = catalogue(MESSAGES)
    for length in (0, 10, 30, 60, len(whole) - 20):
        with pytest.raises(CatalogueError):
            list(read_catalogue(whole[:length]))
    folder = tmp_path / "app" / "de" / "LC_MESSAGES"
    folder.mkdir(parents=True)
    (folder / "a.mo").write_bytes(whole)
    (folder / "b.mo").write_bytes(whole[:60])
    (tmp_path / "app" / "fr").mkdir()
    files = catalogue_files("de", [tmp_path, tmp_path / "absent"])
    assert [path.name for path in files] == ["a.mo", "b.mo"]
    pairs, damaged = translated_messages(files)
    assert pairs == [("%d file was found", "%d Datei gefunden"), ("Open the file", "Datei öffnen")]
    assert damaged == [folder / "b.mo"]


def test_held_out_messages_are_none_of_those_trained_on_and_too_few_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "de" / "LC_MESSAGES"
    folder.mkdir(parents=True)
    many = {"": MESSAGES[""]} | {f"message number {n} of many": f"Nachricht Nummer {n}" for n in range(2500)}
    (folder / "many.mo").write_bytes(catalogue(many))
    assert sum(write_pairs(tmp_path, [tmp_path])) == 2500
    train, heldout = ((tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("train", "heldout"))
    assert not set(train) & set(heldout)
    assert 60 < len(heldout) < 200  # 5 % of 2,500
    (folder / "many.mo").unlink()
    with pytest.raises(UserError, match=r"only 0 translated messages .* Install pretrain\[translation\]"):
        write_pairs(tmp_path, [tmp_path])
