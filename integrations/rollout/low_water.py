"""The least free memory that a device had for a time."""

from __future__ import annotations

import contextlib
import threading
import weakref

from memsaver.errors import MemsaverError
from memsaver.latches import Latch
from memsaver.native import _C
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
        self._over = Latch()
        self._thread: threading.Thread | None = None

    @property
    def peak(self) -> int:
        """The most bytes that were in use."""
        return self.total - self.free

    __enter__ = _C.enter
    __exit__ = _C.exit

    def look(self) -> None:
        """Take the present into account. Raises nothing."""
        try:
            free, total = device_memory(self._device)
        except MemsaverError:
            return
        self.free = min(self.free, free) if self.total else free
        self.total = total

    def _enter(self) -> LowWater:
        self.look()
        if not self.total:
            return self
        thread = threading.Thread(
            target=_keep_looking,
            args=(weakref.ref(self), self._over),
            name="memsaver-low-water",
            daemon=True,
        )
        with contextlib.suppress(RuntimeError):  # no thread to be had: beginning and end remain
            thread.start()
            self._thread = thread
        return self

    def _leave(self, *_: object) -> None:
        self._over.open()
        if self._thread is not None:
            self._thread.join()
        self.look()


def _keep_looking(water: weakref.ref[LowWater], over: Latch) -> None:
    """Until it is over, or nobody has it any more."""
    while not over.wait(_SECONDS):
        kept = water()
        if kept is None:
            return
        kept.look()
        del kept
