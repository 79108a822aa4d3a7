"""Whose the folders of the memory tier are, and the removal of those that belong to nobody any more.

A folder belongs to a run while a process that used it lives, or while the run is there under the same
uuid and could go on from it. What cannot be seen from here (another container's processes) is left alone.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pretrain.errors import PretrainError
from pretrain.rundir.directory import RunDirectory
from pretrain.rundir.process import ProcessIdentity, is_alive, this_process
from pretrain.rundir.records import decode_record, encode_record
from pretrain.store import NotFoundError, Store, UnsupportedError, open_store

PREFIX = "pretrain-ram-"
OWNER_FILE = "owner.json"
DEFAULT_DIRECTORY = Path("/dev/shm")
_ENDED = ("completed", "stopped")  # their last state is durable
_UUID_KEY = "run-uuid.json"  # in the store of the run's checkpoints
_UNFINISHED_S = 3600.0  # a folder without an owner for so long was left by a process that died in between


@dataclass(frozen=True, slots=True)
class MemoryOwner:
    """A run, so that it is found again: its directory, and a uuid that a new run of the same name does not have."""

    run_url: str
    uuid: str


@dataclass(frozen=True, slots=True)
class MemoryFolder:
    """A folder of the tier on this machine.

    Attributes:
        orphan: why it may go; None while a run may need it.
    """

    path: Path
    run_url: str
    bytes: int
    orphan: str | None


def run_uuid(checkpoints: Store) -> str:
    """The run's uuid, drawn at the first call. For one rank.

    Raises:
        PretrainError: it cannot be read or written.
    """
    for _ in range(2):
        with suppress(NotFoundError):
            return str(_read_uuid(checkpoints))
        data = encode_record({"uuid": uuid.uuid4().hex})
        try:
            checkpoints.put_if_absent(_UUID_KEY, data)
        except UnsupportedError:
            checkpoints.put(_UUID_KEY, data)  # the lease sees to it that only one process trains
    return _read_uuid(checkpoints)


def write_owner(folder: Path, owner: MemoryOwner) -> str:
    """Makes the folder, complete with its owner from the start; gives the problem, if any, as text."""
    body = {"run_url": owner.run_url, "uuid": owner.uuid, "process": this_process().to_json()}
    data = encode_record(body)
    try:
        if not folder.is_dir():
            fresh = folder.with_name(f"{folder.name}.{os.getpid()}")
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(mode=0o700)
            (fresh / OWNER_FILE).write_bytes(data)
            fresh.rename(folder)
        else:
            open_store(folder).put(OWNER_FILE, data)
    except (OSError, PretrainError) as error:
        return f"checkpoint.ram_directory={folder.parent} cannot be used: {error}. Make it writable or name another."
    return ""


def memory_folders(base: Path = DEFAULT_DIRECTORY) -> list[MemoryFolder]:
    """This user's folders of the tier in a directory, and which of them belong to nobody."""
    found = []
    with suppress(OSError):
        for path in sorted(base.glob(f"{PREFIX}*")):
            with suppress(OSError):
                if path.lstat().st_uid == os.getuid() and path.is_dir() and not path.is_symlink():
                    found.append(_inspect(path))
    return found


def remove_orphans(base: Path = DEFAULT_DIRECTORY, *, without: str | None = None) -> list[MemoryFolder]:
    """Removes the folders that belong to no living or resumable run, and those of the run with uuid `without`."""
    orphans = [
        folder
        for folder in memory_folders(base)
        if folder.orphan or (without and folder.path.name.startswith(f"{PREFIX}{without}-"))
    ]
    for folder in orphans:
        shutil.rmtree(folder.path, ignore_errors=True)
    return orphans


def folder_bytes(path: Path) -> int:
    """Bytes of all files in a folder that may change meanwhile."""
    size = 0
    for parent, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                size += os.lstat(os.path.join(parent, name)).st_size
    return size


def _inspect(path: Path) -> MemoryFolder:
    size = folder_bytes(path)
    try:
        body = decode_record((path / OWNER_FILE).read_bytes(), str(path / OWNER_FILE), "")
        run_url, identifier = str(body["run_url"]), str(body["uuid"])
        process = ProcessIdentity.from_json(body["process"])
    except (OSError, PretrainError, KeyError, ValueError):
        old = time.time() - path.stat().st_mtime > _UNFINISHED_S
        return MemoryFolder(path, "", size, "nobody wrote down whose it is" if old else None)
    orphan = _why_orphan(run_url, identifier) if is_alive(process) is False else None
    return MemoryFolder(path, run_url, size, orphan)


def _why_orphan(run_url: str, identifier: str) -> str | None:
    """Why a run whose process is gone does not need its memory any more."""
    try:
        run = RunDirectory(open_store(run_url))
        if _read_uuid(run.checkpoints) != identifier:
            return f"{run_url} is another run now"
        state = run.status().state
    except NotFoundError:
        return f"{run_url} is gone"
    except PretrainError:
        return None  # it cannot be read now; what is not known is not deleted
    return f"{run_url} is {state}" if state in _ENDED else None


def _read_uuid(checkpoints: Store) -> str:
    body = decode_record(checkpoints.get(_UUID_KEY), f"{checkpoints.url}/{_UUID_KEY}", "Remove it; it is drawn anew.")
    return str(body["uuid"])
