"""Small JSON files that carry the sha256 of their canonical body: `{"body": …, "sha256": …}`.

Takes a dict → bytes and back. A flipped bit, a cut or an edit is an error that names the file.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

from pretrain.errors import RunError
from pretrain.store import Store


class DamagedFileError(RunError):
    """A file of a run does not match its own checksum."""


def encode_record(body: dict[str, Any]) -> bytes:
    """The file of a body; numbers that JSON does not have (nan, inf) become text."""
    body = _finite(body)
    return (json.dumps({"body": body, "sha256": _sha256(body)}, sort_keys=True, indent=1) + "\n").encode()


def decode_record(data: bytes, name: str, remedy: str) -> dict[str, Any]:
    """The body of a file.

    Args:
        data: what the file holds.
        name: how an error calls it.
        remedy: what to do when it is damaged.

    Raises:
        DamagedFileError: it is no such record, or not the one that was written.
    """
    try:
        record = json.loads(data)
        body, found = record["body"], record["sha256"]
        if not isinstance(body, dict) or set(record) != {"body", "sha256"}:
            raise ValueError("not a record")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise damaged(name, "it is not a record of JSON", remedy) from None
    if found != _sha256(body):
        raise damaged(name, "its content does not match its sha256", remedy)
    return body


def read_record(store: Store, key: str, remedy: str) -> dict[str, Any]:
    """`decode_record` of a file in a store. Raises NotFoundError, StoreError or DamagedFileError."""
    return decode_record(store.get(key), f"{store.url}/{key}", remedy)


def damaged(name: str, why: str, remedy: str) -> DamagedFileError:
    """The error of a file that cannot be trusted."""
    return DamagedFileError(f"{name} is damaged: {why}. What is read back must be what was written. {remedy}")


def _sha256(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value
