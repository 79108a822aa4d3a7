"""From a path or URL to the store that serves it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from pretrain.errors import UserError
from pretrain.store.base import Store
from pretrain.store.local import LocalStore


def open_store(url: str | Path) -> Store:
    """The store at a directory (created at the first write) or at an fsspec URL (`s3://`, `memory://`, …).

    Raises:
        UserError: an empty path, a URL with a password, of an unknown kind or of one whose package is not installed.
    """
    text = str(url)
    if not text:
        raise UserError("The path of a store is empty. It must be a directory or a URL. Give one, such as ./runs.")
    if "://" not in text:
        return LocalStore(text)
    user, at, host = text.split("://", 1)[1].split("/", 1)[0].rpartition("@")
    if at and ":" in user:
        raise UserError(
            f"A URL at {host} holds a password. URLs are written into files and shown. "
            "Take it out and set it in the environment (for s3://, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)."
        )
    if text.startswith("file://"):
        return LocalStore(unquote(urlsplit(text).path))
    # fsspec takes 0.1 s to import: only who needs it pays.
    from pretrain.store.remote import RemoteStore

    return RemoteStore(text)
