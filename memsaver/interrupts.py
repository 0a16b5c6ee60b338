"""Ctrl-C at a time when leaving would lose something, or let others wait."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec

__all__ = ["interrupts_deferred", "once"]

Handler = Callable[[int, FrameType | None], object]
Arguments = ParamSpec("Arguments")


class interrupts_deferred:
    """SIGINT's handler is called at the end of the block instead of within. May be nested.

    Once, however often the signal came, as for one that a process blocks. Concerns the main thread,
    on which Python calls handlers; in other threads, and where SIGINT has no handler of Python's,
    nothing is done. A block that an exception out of another signal's handler has left half-way
    defers nothing more when it is gone, and a child that is forked in the block is not concerned. A
    handler that is set in the block stays.

    An interrupt on the way into the block is raised there: `once` is for what must be done all the
    same.
    """

    def __enter__(self) -> None:
        global _handler
        if threading.get_ident() != threading.main_thread().ident:
            return
        handler = signal.getsignal(signal.SIGINT)
        if handler is not _note:
            if not callable(handler):
                return
            _handler = handler
        try:
            _blocks.append(weakref.ref(self))
            if handler is not _note:
                with contextlib.suppress(ValueError):  # no thread that may set a handler
                    signal.signal(signal.SIGINT, _note)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        mine = weakref.ref(self)
        if mine in _blocks:
            _blocks.remove(mine)
            if not _is_deferred():
                _deliver()


def once(
    begun: list[bool],
    action: Callable[Arguments, object],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> None:
    """Do it with interrupts deferred, if it was not begun. For what must be done, and once.

        begun: list[bool] = []
        try:
            once(begun, action)
        finally:
            once(begun, action)

    An interrupt that comes on the way into the first call is raised after the second, which does it
    then; where the first has begun, the second does nothing.
    """
    if begun:
        return
    with interrupts_deferred():
        begun.append(True)
        action(*args, **kwargs)


# Of the main thread.
_handler: Handler | None = None  # whose place ours has taken
_blocks: list[weakref.ref[interrupts_deferred]] = []  # that have been entered, innermost last
_came: list[tuple[int, FrameType | None]] = []


def _note(number: int, frame: FrameType | None) -> None:
    """SIGINT's handler in a block."""
    if not _came:
        _came.append((number, frame))
    if not _is_deferred():  # left behind by a block that is gone
        _deliver()


def _is_deferred() -> bool:
    while _blocks and _blocks[-1]() is None:
        _blocks.pop()
    return bool(_blocks)


def _deliver() -> None:
    """The handler is the caller's again, and hears of what came."""
    if signal.getsignal(signal.SIGINT) is _note and _handler is not None:
        signal.signal(signal.SIGINT, _handler)
    handler = signal.getsignal(signal.SIGINT)
    while _came and callable(handler):
        handler(*_came.pop(0))


def _forget() -> None:
    """In a forked child, where the blocks of other threads never end."""
    _blocks.clear()
    _came.clear()
    with contextlib.suppress(ValueError):
        _deliver()


os.register_at_fork(after_in_child=_forget)
