"""`LowWater`: measures the minimum free memory of a device during a block."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref

from memsaver._inspection.statistics import device_memory
from memsaver._runtime.background import start_daemon
from memsaver._runtime.latches import Latch
from memsaver._runtime.native import _C
from memsaver.errors import MemsaverError

__all__ = ["LowWater"]

_END_SECONDS = 1.0  # the longest wait for the sample in progress
_SECONDS = 0.005  # the interval between two samples, each of which takes a few microseconds


class LowWater:
    """The minimum of a device's free memory during a block.

    The memory is sampled at the beginning and at the end of the block, and in between by a separate
    thread. Memory that is allocated and released between two samples is not counted. The samples
    include the memory use of all processes.

    Attributes:
        free: the minimum free memory over all samples, in bytes; 0 if there is no driver.
        total: the device's total memory, in bytes; 0 if there is no driver.
    """

    def __init__(self, device: int) -> None:
        self.free = self.total = 0
        self._device = device
        self._over = Latch()
        self._thread: threading.Thread | None = None

    @property
    def peak(self) -> int:
        """The peak memory in use, in bytes."""
        return self.total - self.free

    __enter__ = _C.enter
    __exit__ = _C.exit

    def look(self) -> None:
        """Take a sample. Raises nothing."""
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
        work = functools.partial(_keep_looking, weakref.ref(self), self._over)
        # Without a thread, only the first and the last sample are taken.
        with contextlib.suppress(RuntimeError):
            self._thread = start_daemon("low-water", work)
        return self

    def _leave(self, *_: object) -> None:
        self._over.open()
        if self._thread is not None:
            # Bounded: a finalizer on the sampling thread may wait for a tag that this thread owns.
            self._thread.join(_END_SECONDS)
        self.look()


def _keep_looking(water: weakref.ref[LowWater], over: Latch) -> None:
    """Take samples until the block ends or the object is deleted."""
    while not over.wait(_SECONDS):
        kept = water()
        if kept is None:
            return
        kept.look()
        del kept
