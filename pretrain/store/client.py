"""The client that reaches a URL, with the settings that reading ranges of files in parallel needs.

Takes a URL -> gives (fsspec file system, path in it). Everything that is no default of the client
library is here, with its reason.
"""

from __future__ import annotations

import os
from typing import Any

from pretrain.errors import UserError

_SILENCE_S = 60.0  # a connection that says nothing for as long is dead
_ABSENT = (404, 410)  # answers of HTTP
_PACKAGES = {"s3": "s3fs", "http": "aiohttp", "https": "aiohttp", "gs": "gcsfs", "abfs": "adlfs"}


def is_http(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def is_absent(url: str, error: FileNotFoundError) -> bool:
    """Whether the file is not there: over HTTP, fsspec says so of whatever ends a request for its size."""
    if not is_http(url) or error.__cause__ is None:
        return True
    return getattr(error.__cause__, "status", None) in _ABSENT


def open_url(url: str) -> tuple[Any, str]:
    """
    Raises:
        UserError: nobody knows how to reach a URL of this kind, or its package is missing.
    """
    import fsspec  # 0.1 s: only who needs it pays

    kind = url.split("://", 1)[0]
    try:
        return fsspec.url_to_fs(url, use_listings_cache=False, **_options(url))
    except (ImportError, ValueError) as error:
        package = _PACKAGES.get(kind, f"the package that serves {kind}://")
        raise UserError(
            f"url={url} cannot be opened: {error}. The kind must be one that fsspec knows and whose package is "
            f"installed. Install it with `pip install {package}`, or correct the URL."
        ) from None


def _options(url: str) -> dict[str, Any]:
    if is_http(url):
        import aiohttp

        # aiohttp's own limit ends every request after 5 minutes, however well it goes.
        return {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=_SILENCE_S)}}
    if url.startswith("s3://"):
        # botocore checks a range against a checksum that several stores (rclone, older MinIO) give for the whole
        # object, and sends trailers that they refuse. What matters is checked by our own checksums.
        names = ("request_checksum_calculation", "response_checksum_validation")
        settings = {name: "when_required" for name in names if f"AWS_{name.upper()}" not in os.environ}
        return {"config_kwargs": settings | {"max_pool_connections": 64, "connect_timeout": 10}}
    return {}
