"""What is written down about a checkpoint: a pin that a person set, a lease of a reader, that it was found bad.

    step-00001200-a003/PINNED.json            kept until it is unpinned
    step-00001200-a003/SET_ASIDE.json         found damaged: not used until it was verified again
    step-00001200-a003/readers/<id>.json      while that process lives; from elsewhere at most a day

A reader writes its lease and only then looks at the manifest; a deleter takes the manifest away, looks
for leases, and puts the manifest back if there is one. So one of the two always sees the other.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from pretrain.checkpoint.format import MANIFEST
from pretrain.errors import CheckpointError, PretrainError, StoreError
from pretrain.rundir import ProcessIdentity, is_alive, this_process
from pretrain.rundir.records import encode_record, read_record
from pretrain.store import NotFoundError, Store

PIN_FILE = "PINNED.json"
SET_ASIDE_FILE = "SET_ASIDE.json"
READERS = "readers"
_UNSEEN_READER_S = 86400.0  # a process of another host or container, which cannot be looked at


def pin(store: Store, name: str) -> None:
    """Keeps a checkpoint until `unpin`. `store` holds the checkpoints of a run.

    Raises:
        CheckpointError: there is no such published checkpoint.
        StoreError: the pin cannot be written.
    """
    _published(store, name)
    store.put(f"{name}/{PIN_FILE}", encode_record({"t": time.time(), "by": str(this_process())}))
    if not store.exists(f"{name}/{MANIFEST}"):
        store.delete_tree(name)
        raise CheckpointError(f"checkpoint={name} was deleted just now. A pin keeps what is there. Pin another one.")


def unpin(store: Store, name: str) -> bool:
    """Takes a pin away; False if there was none.

    Raises:
        CheckpointError: there is no such published checkpoint.
        StoreError: it cannot be taken away.
    """
    _published(store, name)
    pinned = is_pinned(store, name)
    store.delete(f"{name}/{PIN_FILE}")
    return pinned


def is_pinned(store: Store, name: str) -> bool:
    return store.exists(f"{name}/{PIN_FILE}")


def set_aside(store: Store, name: str, why: str) -> None:
    """Marks a checkpoint whose bytes are not as written, so that no restore tries it again.

    Raises:
        StoreError: the mark cannot be written.
    """
    store.put(f"{name}/{SET_ASIDE_FILE}", encode_record({"t": time.time(), "by": str(this_process()), "why": why}))


def why_set_aside(store: Store, name: str) -> str | None:
    """The reason, or None when it was not."""
    try:
        body = read_record(store, f"{name}/{SET_ASIDE_FILE}", "Verify the checkpoint.")
        return str(body.get("why"))
    except NotFoundError:
        return None
    except PretrainError as error:
        return str(error)


def take_back(store: Store, name: str) -> bool:
    """Removes the mark, once every byte was verified; says whether there was one.

    Raises:
        StoreError: it cannot be removed.
    """
    marked = store.exists(f"{name}/{SET_ASIDE_FILE}")
    store.delete(f"{name}/{SET_ASIDE_FILE}")
    return marked


def readers(store: Store, name: str) -> list[str]:
    """Who reads a checkpoint now; leases of processes that are gone do not count, damaged ones do."""
    found = []
    for entry in store.names(f"{name}/{READERS}"):
        key = f"{name}/{READERS}/{entry}"
        try:
            body = read_record(store, key, "Remove it when nobody reads this checkpoint.")
            process, since = ProcessIdentity.from_json(body["process"]), float(body["t"])
        except NotFoundError:
            continue
        except (PretrainError, KeyError, ValueError) as error:
            found.append(f"somebody ({error})")
            continue
        alive = is_alive(process)
        if alive or (alive is None and time.time() - since < _UNSEEN_READER_S):
            found.append(f"{process} ({body.get('purpose')})")
    return found


@contextmanager
def reading(store: Store, name: str, purpose: str) -> Iterator[None]:
    """Keeps a published checkpoint from being deleted meanwhile. Where nothing can be written, nothing is."""
    key = f"{name}/{READERS}/{this_process().pid}-{secrets.token_hex(6)}.json"
    held = False
    if store.exists(f"{name}/{MANIFEST}"):  # a lease must not make a folder where there is none
        with suppress(StoreError):
            store.put(key, encode_record({"process": this_process().to_json(), "t": time.time(), "purpose": purpose}))
            held = True
    try:
        yield
    finally:
        if held:
            with suppress(StoreError):
                store.delete(key)


def delete_unless_held(store: Store, name: str, progress: Callable[[], None] = lambda: None) -> bool:
    """Deletes a checkpoint, manifest first, unless somebody reads or pins it; says whether it is gone.

    Args:
        progress: called for each deleted file.

    Raises:
        StoreError: a deletion failed.
    """
    if is_pinned(store, name) or readers(store, name):
        return False
    manifest: bytes | None = None
    with suppress(NotFoundError):
        manifest = store.get(f"{name}/{MANIFEST}")
    store.delete(f"{name}/{MANIFEST}")
    if manifest is not None and (is_pinned(store, name) or readers(store, name)):
        store.put(f"{name}/{MANIFEST}", manifest)
        return False
    store.delete_tree(name, progress)
    return True


def _published(store: Store, name: str) -> None:
    if not store.exists(f"{name}/{MANIFEST}"):
        there = ", ".join(entry for entry in store.names() if store.exists(f"{entry}/{MANIFEST}")) or "none"
        raise CheckpointError(f"checkpoint={name} does not exist in {store.url}. There are: {there}. Name one of them.")
