"""What processes that died leave: half-written files, temporary folders. Whose they are stands in their names.

takes → a store, or a kind of folder; gives → the names of what was removed. A thing goes when its process, of this
kernel and pid namespace, is gone; one of another machine when it is older than any write could last.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
import uuid
from pathlib import Path

from pretrain.store.base import TEMPORARY, Store

OLDEST_WRITE_S = 6 * 3600.0


def temporary_name(name: str) -> str:
    """A name for a file that is being written here, until it gets `name`."""
    return f"{TEMPORARY}{name[:100]}-{_place()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def remove_leftovers(store: Store) -> list[str]:
    """Removes what nobody is writing any more; nothing on object stores, where a write is one request."""
    root = store.local_path("")
    removed: list[str] = []
    if root is None:
        return removed
    for parent, _, files in os.walk(root):
        for name in files:
            path = Path(parent) / name
            if name.startswith(TEMPORARY) and _is_abandoned(path):
                with contextlib.suppress(OSError):  # another process swept it, or may: nothing depends on it
                    path.unlink()
                    removed.append(str(path.relative_to(root)))
    return removed


def _is_abandoned(path: Path) -> bool:
    *_, place, pid, _ = ["", "", *path.name.split("-")]
    if place == _place() and pid.isdigit():
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
    with contextlib.suppress(OSError):  # of another machine, or nobody's that is known
        return time.time() - path.stat().st_mtime > OLDEST_WRITE_S
    return False


def _place() -> str:
    """Where a pid is unique: this boot of this kernel, this pid namespace."""
    parts = [os.uname().nodename]
    for source in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with contextlib.suppress(OSError):
            parts.append(os.readlink(source) if source.endswith("pid") else Path(source).read_text().strip())
    return hashlib.sha256("/".join(parts).encode()).hexdigest()[:8]


def make_scratch(kind: str) -> Path:
    """A temporary folder of this process, closed to others; those that killed processes left go."""
    sweep_scratch(kind)
    return Path(tempfile.mkdtemp(prefix=f"pretrain-{kind}-{_place()}-{os.getpid()}-"))


def sweep_scratch(kind: str) -> list[Path]:
    """Removes folders of that kind whose processes are gone; gives what was removed."""
    removed = []
    for folder in Path(tempfile.gettempdir()).glob(f"pretrain-{kind}-*"):
        if folder.lstat().st_uid == os.getuid() and _is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed
