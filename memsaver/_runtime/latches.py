"""Synchronization primitives whose shared state cannot be damaged by an interrupt."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator

from memsaver._runtime.interrupts import signals_deferred
from memsaver._runtime.native import _C

__all__ = ["Gate", "Latch", "Mutex"]


class Latch:
    """A one-shot event. Thread-safe.

    Unlike with `threading.Event`, interrupting `wait` cannot release a lock that another thread
    owns, because waiting threads share no lock.
    """

    def __init__(self) -> None:
        self._is_open = False
        self._waiters: list[threading.Lock] = []  # each locked until the event is set

    def is_open(self) -> bool:
        """Return whether the event is set."""
        return self._is_open

    def open(self) -> None:
        """Set the event and wake all waiters. Can be repeated, for example after an interrupt."""
        self._is_open = True
        for waiter in tuple(self._waiters):  # each waiter removes itself when it wakes
            with contextlib.suppress(RuntimeError):  # released already
                waiter.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds` (None: no limit), and return whether the event is set.
        Interruptible.
        """
        if not self._is_open:
            waiter = threading.Lock()
            waiter.acquire()
            self._waiters.append(waiter)
            if not self._is_open:  # `open` sets the flag before it reads the list
                timeout = -1 if seconds is None else min(max(seconds, 0), threading.TIMEOUT_MAX)
                waiter.acquire(timeout=timeout)
            self._waiters.remove(waiter)
        return self._is_open


class Mutex:
    """A reentrant lock for blocks that do not wait for callbacks. Thread-safe.

    During a block, no signal handler runs on the block's thread, and no automatic garbage
    collection starts in the process. Otherwise, a handler or a finalizer could wait for a tag whose
    owner waits for this lock in a callback. For the same reason, a block must not free objects
    whose finalizers wait. If the program disables the garbage collector during a block, it is
    enabled again at the end of the block.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other threads during the block."""
        with signals_deferred():
            _C.pause_collection()
            try:
                with self._lock:
                    yield
            finally:
                _C.resume_collection()


class _Entry:
    """The record of the thread inside a gate, and of that thread's nested blocks."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.blocks = [None]  # one item for each block
        self.last = [None]  # removed by the block that leaves the gate
        self.left = Latch()


class Gate:
    """Mutual exclusion for blocks, in which a thread never waits for itself.

    A gate is like `threading.Lock` with a timeout, but an interrupt cannot occur between acquiring
    the gate and recording the acquisition. The gate's own state has no lock, because while a thread
    changes this state, a finalizer can run on that thread and wait for a tag whose owner is
    entering the gate.

    Args:
        reentrant: whether a thread in a block may enter further blocks.
    """

    def __init__(self, reentrant: bool = False) -> None:
        self._reentrant = reentrant
        self._inside: dict[int, _Entry] = {}  # at most one, under 0; `setdefault` is atomic

    @contextlib.contextmanager
    def passed(self, seconds: float, late: Callable[[], Exception]) -> Iterator[None]:
        """Exclude other threads during the block.

        If the gate is not free within `seconds`, the call raises the result of `late`. If this
        thread is already in a block and the gate is not reentrant, the call raises it immediately.
        """
        taken: list[_Entry] = []
        give = functools.partial(self._give, taken)
        try:
            if not self._take(time.monotonic() + seconds, taken):
                raise late()
            yield
        finally:
            _C.uninterrupted(give, True)

    def _take(self, deadline: float, taken: list[_Entry]) -> bool:
        mine = _Entry()
        while True:
            with signals_deferred():
                entry = self._inside.setdefault(0, mine)
                is_inside = entry.thread == mine.thread
                if entry is mine or (is_inside and self._reentrant):
                    if entry is not mine:
                        entry.blocks.append(None)
                    taken.append(entry)
                    return True
            if is_inside:
                return False
            if not entry.left.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                return False

    def _give(self, taken: list[_Entry]) -> None:
        if not taken:
            return
        entry = taken.pop()
        entry.blocks.pop()
        if entry.blocks:
            return
        # A finalizer may enter and leave the gate between any two of these lines, and thus be the
        # last to leave.
        with contextlib.suppress(IndexError):
            entry.last.pop()
            self._inside.pop(0)
            entry.left.open()
