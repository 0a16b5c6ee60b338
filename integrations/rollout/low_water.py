"""The least free memory that a device had for a time."""

from __future__ import annotations

import threading
from types import TracebackType

from memsaver.errors import MemsaverError
from memsaver.statistics import device_memory

__all__ = ["LowWater"]

_SECONDS = 0.005  # between two looks; one takes the driver some microseconds


class LowWater:
    """A block's low-water mark of a device's free memory, whoever uses the memory.

    Looks at the beginning, at the end, and in between from a thread of its own: what comes and goes
    between two looks is not seen.

    Attributes:
        free: the least free bytes that were seen; with
        total: the device's bytes. Both are 0 where no driver can be asked.
    """

    def __init__(self, device: int) -> None:
        self.free = self.total = 0
        self._device = device
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def peak(self) -> int:
        """The most bytes that were in use."""
        return self.total - self.free

    def __enter__(self) -> LowWater:
        self.look()
        if self.total:
            self._thread = threading.Thread(
                target=self._keep_looking, name="memsaver-low-water", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError:  # no thread to be had: the beginning and the end remain
                self._thread = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self.look()

    def look(self) -> None:
        """Take the present into account. Raises nothing."""
        try:
            free, total = device_memory(self._device)
        except MemsaverError:
            return
        self.free = min(self.free, free) if self.total else free
        self.total = total

    def _keep_looking(self) -> None:
        while not self._over.wait(_SECONDS):
            self.look()
