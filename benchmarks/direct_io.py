"""Measure direct I/O with 4 threads and 16 MiB pieces, and drop the page cache."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

THREADS = 4
PIECE = 16 << 20


class DirectFile:
    """A temporary file of `total` bytes in a directory; `total` must be a multiple of PIECE.

    Raises OSError if the file system lacks direct I/O or free space.
    """

    def __init__(self, directory: Path, total: int) -> None:
        if total % PIECE:
            raise ValueError(f"{total} bytes are not pieces of {PIECE}")
        number, path = tempfile.mkstemp(dir=directory)
        os.close(number)
        try:
            self._file = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        finally:
            os.unlink(path)
        self._pieces = total // PIECE
        self._buffers = [mmap.mmap(-1, PIECE) for _ in range(THREADS)]  # aligned to pages
        for buffer in self._buffers:
            buffer.write(os.urandom(PIECE))

    def write_ms(self) -> float:
        """Allocate new space, as `fio` does by default, and write the complete file; return the
        duration of the writes in milliseconds.
        """
        os.ftruncate(self._file, 0)
        os.posix_fallocate(self._file, 0, self._pieces * PIECE)
        return self._timed_ms(os.pwritev)

    def read_ms(self) -> float:
        """Read the complete file; return the duration in milliseconds."""
        return self._timed_ms(os.preadv)

    def close(self) -> None:
        """Release the space."""
        os.close(self._file)

    def _timed_ms(self, call: Callable[[int, list[mmap.mmap], int], int]) -> float:
        def work(thread: int) -> None:
            for piece in range(thread, self._pieces, THREADS):
                moved = call(self._file, [self._buffers[thread]], piece * PIECE)
                if moved != PIECE:
                    raise OSError(f"{moved} of {PIECE} bytes were read or written")

        with ThreadPoolExecutor(THREADS) as threads:
            start = time.perf_counter()
            list(threads.map(work, range(THREADS)))
            return round((time.perf_counter() - start) * 1e3, 3)


def drop_page_cache(directory: Path) -> int:
    """Write back and drop the page cache of a directory's files; return the number of files.

    Includes files that this process has open, even if they have no name.
    """
    os.sync()
    dropped = 0
    for path in directory.iterdir():
        with contextlib.suppress(OSError):
            number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(number)
            dropped += 1
    inside = f"{directory.resolve()}/"
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            # A file without a name looks like "/directory/#123 (deleted)".
            if os.readlink(link).startswith(inside):
                os.posix_fadvise(int(link.name), 0, 0, os.POSIX_FADV_DONTNEED)
                dropped += 1
    return dropped
