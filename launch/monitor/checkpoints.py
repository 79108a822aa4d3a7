"""Whether the checkpoints of a run are whole, for a page: manifests and sizes, no tensors. Without torch, which takes
seconds to import: a page opens before that.

Takes the store of a run's checkpoints -> problems by name. `pretrain checkpoint verify` reads and hashes every byte.
"""

from __future__ import annotations

import re

from pretrain.errors import PretrainError
from pretrain.rundir.records import read_record
from pretrain.store import NotFoundError, Store

_NAME = re.compile(r"step-\d+-a\d+")
_MANIFEST, _SET_ASIDE = "MANIFEST.json", "SET_ASIDE.json"  # a test compares them with the checkpoint room's


def checkpoint_problems(store: Store) -> dict[str, str]:
    """What is wrong with each checkpoint that is there; an empty text where its manifest is whole and sizes match.

    Raises:
        StoreError: the store cannot be listed.
    """
    return {name: _problem(store, name) for name in store.names() if _NAME.fullmatch(name)}


def _problem(store: Store, name: str) -> str:
    try:
        body = read_record(store, f"{name}/{_MANIFEST}", "Verify the checkpoint.")
        files = {str(file["name"]): int(file["bytes"]) for file in body["files"]}
    except NotFoundError:
        return "never published"
    except (PretrainError, KeyError, TypeError, ValueError) as error:
        return str(error)
    for file, size in files.items():
        try:
            found = store.size(f"{name}/{file}")
        except PretrainError:
            return f"{file} is missing"
        if found != size:
            return f"{file} has {found} bytes instead of {size}"
    return "set aside" if store.exists(f"{name}/{_SET_ASIDE}") else ""
