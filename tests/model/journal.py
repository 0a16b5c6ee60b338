"""Records the operations of the current sequence in a file that outlives the process."""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path

STUCK_SECONDS = 90  # of a sequence, which takes 1 s; then the process logs its stacks and exits


class Journal:
    """The record of the current sequence, which shows the last operation of a crashed process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self.has_failed = False

    def start(self) -> None:
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        self.note("a new sequence")
        faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)

    def note(self, line: str) -> None:
        os.write(self._file, f"{line}\n".encode())

    def keep(self, error: Exception) -> None:
        """Print the current, failed sequence unless an earlier sequence was printed."""
        if not self.has_failed:
            self.has_failed = True
            sequence = os.pread(self._file, os.fstat(self._file).st_size, 0).decode()
            print(f"{error!r}, in {sequence}", flush=True)
