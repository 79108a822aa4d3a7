"""Reading zstandard files: as many frames as the file holds, and an error where one ends early.

The library's own stream reader takes a file that was cut in the middle for a shorter one.
"""

from __future__ import annotations

import io
from typing import Any

from pretrain.errors import DataError, UserError

_CHUNK_BYTES = 2**18


class ZstdFile(io.RawIOBase):
    """Wrap it in `io.BufferedReader`.

    Raises:
        UserError: the package zstandard is missing.
        DataError: (from reads) damaged or cut off.
    """

    def __init__(self, raw: io.BufferedIOBase, where: str) -> None:
        try:
            import zstandard
        except ImportError:
            raise UserError(
                f"{where} needs the package zstandard, which is not installed. Install it with "
                "`pip install zstandard` (or `pip install 'pretrain[formats]'`)."
            ) from None
        self._raw, self._where = raw, where
        self._errors = zstandard.ZstdError
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._fill():
                return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _fill(self) -> bool:
        """Decompresses a piece (which may give nothing yet); False at the end of the file."""
        rest = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
        data = rest or self._raw.read(_CHUNK_BYTES)
        if not data:
            if self._frame is not None and not self._frame.eof:
                raise DataError(f"{self._where} is damaged: it ends within a frame. Get the file again.")
            return False
        if self._frame is None or self._frame.eof:
            self._frame = self._new_frame()
        try:
            self._ready = memoryview(self._frame.decompress(data))
        except self._errors as error:
            raise DataError(f"{self._where} is damaged: {error}. Get the file again.") from None
        return True
