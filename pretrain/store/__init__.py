"""Where the files of a run and of data live. Nobody else opens, renames or deletes such files.

A store is a flat set of keys (`a/b/c`) over a local directory or, through fsspec, an object store.
What is written appears whole or not at all, and what was reported as written survives a crash.
"""

from pretrain.store.base import ListsSizes, NotFoundError, ReadsInto, Store, UnsupportedError
from pretrain.store.leftovers import make_scratch, remove_leftovers
from pretrain.store.open import open_store

__all__ = [
    "ListsSizes",
    "NotFoundError",
    "ReadsInto",
    "Store",
    "UnsupportedError",
    "make_scratch",
    "open_store",
    "remove_leftovers",
]
