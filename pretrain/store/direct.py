"""Writing a file past the page cache where memory, position and file system allow it.

A large state that is written through the cache waits twice: for the copy into it, and at the end for a
disk that began late (measured: 115 to 250 MB/s through the cache, 420 to 480 past it). It also pushes out what
training reads. Pieces that are not aligned (small files, a file's tail) take the cache, in the same file.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os

ALIGNMENT = 4096  # of memory, position and length; no file system in use wants more
_SMALLEST = 2**20  # below that the cache is quicker
_DIRECT: int = getattr(os, "O_DIRECT", 0)
_REFUSED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


class FileWriter:
    """Appends pieces to a file that is open for writing and still empty."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._is_direct = False
        self._may_be_direct = bool(_DIRECT)
        self.written = 0

    def write(self, piece: memoryview) -> None:
        """Writes all of a piece of bytes. Raises OSError."""
        while len(piece):
            self._choose(piece)
            try:
                count = os.write(self._descriptor, piece)
            except OSError as error:
                if not self._is_direct or error.errno not in _REFUSED:
                    raise
                self._may_be_direct = False  # the file system took the flag and refuses the write
                continue
            self.written += count
            piece = piece[count:]

    def _choose(self, piece: memoryview) -> None:
        wanted = self._may_be_direct and len(piece) >= _SMALLEST and self._is_aligned(piece)
        if wanted == self._is_direct:
            return
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | _DIRECT if wanted else flags & ~_DIRECT)
            self._is_direct = wanted
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._may_be_direct = False  # tmpfs and some network file systems

    def _is_aligned(self, piece: memoryview) -> bool:
        if piece.readonly or self.written % ALIGNMENT or len(piece) % ALIGNMENT:
            return False
        return ctypes.addressof(ctypes.c_char.from_buffer(piece)) % ALIGNMENT == 0
