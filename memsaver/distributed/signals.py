"""Signal handlers of Python that run between the collectives of a call, and not in their middle.

An exception out of a handler (Ctrl-C, an alarm, a preemption handler that pauses) at a random place
of a collective call would let the other ranks wait for this one. In a block of `signals_deferred` a
handler runs at the next `interruptible` work, whose failure the other ranks learn of, or at the
latest at the end of the block. Concerns the main thread, on which Python runs handlers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from memsaver import interrupts

__all__ = ["collective_block", "interruptible", "signals_deferred"]

Handler = Callable[[int, FrameType | None], object]
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class signals_deferred(contextlib.ContextDecorator):
    """Run Python's signal handlers at the end of the block. May be nested. A decorator too.

    A signal that came several times is handled once, as one that a process blocks.
    Does nothing on other threads than the main one, and leaves SIGINT alone if an outer
    `interrupts_deferred` defers it already. A signal on the way into the block is handled there.
    """

    def __init__(self) -> None:
        self._entered = False
        self._was_open = True
        self._installed: list[int] = []

    def _recreate_cm(self) -> signals_deferred:
        return signals_deferred()

    def __enter__(self) -> None:
        global _open, _depth
        if threading.get_ident() != threading.main_thread().ident:
            return
        self._was_open = _open or not _depth
        try:
            self._entered, _depth, _open = True, _depth + 1, False
            if _depth == 1:
                for number in _SIGNALS:
                    if callable(_handler_of(number)):
                        self._install(number)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        global _open, _depth
        if not self._entered:
            return
        # From here on a handler that comes is run at once, also if it is still ours that is set.
        self._entered, _depth, _open = False, _depth - 1, self._was_open
        try:
            if _open:
                _deliver()
        finally:
            for number in self._installed:
                if signal.getsignal(number) is _handle:  # else one was set in the block, and stays
                    signal.signal(number, _handlers[number])

    def _install(self, number: int) -> None:
        handler: Any = signal.getsignal(number)
        if handler is not _handle and handler is not interrupts._note:
            _handlers[number] = handler
            self._installed.append(number)
            signal.signal(number, _handle)


def interruptible(work: Callable[[], Result]) -> Result:
    """Do the work with signal handlers running, first those that were deferred.

    After an exception out of a handler, and after the work, they are deferred again.
    """
    global _open
    if not _depth or threading.get_ident() != threading.main_thread().ident:
        return work()
    try:
        _open = True
        _deliver()
        return work()
    finally:
        _open = False


def collective_block(
    generator: Callable[Arguments, Iterator[Result]],
) -> Callable[Arguments, contextlib.AbstractContextManager[Result]]:
    """Make a context manager whose entry and exit, but not the block, defer signals.

    A signal whose handler raises at the end of the entry is an exception of the block. Otherwise as
    `contextlib.contextmanager`.
    """
    manager = contextlib.contextmanager(generator)

    @functools.wraps(generator)
    def made(*args: Arguments.args, **named: Arguments.kwargs) -> _Block[Result]:
        return _Block(lambda: manager(*args, **named))

    return made


class _Block(contextlib.ContextDecorator, contextlib.AbstractContextManager[Result]):
    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[Result]]) -> None:
        self._make = make
        self._entered: list[contextlib.AbstractContextManager[Result]] = []  # innermost last

    def __enter__(self) -> Result:
        manager = self._make()
        self._entered.append(manager)
        try:
            with signals_deferred():
                return manager.__enter__()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(self, *error: Any) -> bool | None:
        with signals_deferred():
            return self._entered.pop().__exit__(*error)


# Of the main thread.
_SIGNALS = sorted(signal.valid_signals())
# Without the wrapper, which takes ten times as long to make an enumeration's member of a default.
_handler_of = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
_handlers: dict[int, Handler] = {}  # whose place ours has taken
_came: list[tuple[int, FrameType | None]] = []
_depth = 0  # blocks that have been entered
_open = True  # whether handlers run at once in the innermost of them


def _handle(number: int, frame: FrameType | None) -> None:
    """The handler of all signals in a block."""
    global _open
    if not (_open or not _depth):
        if number not in (noted for noted, _ in _came):
            _came.append((number, frame))
        return
    # One exception at a time: a further one could come when nobody is there to catch it.
    _open = False
    _handlers[number](number, frame)
    _open = True


def _deliver() -> None:
    if _came:
        number, frame = _came.pop(0)
        try:
            _handle(number, frame)
        finally:
            if _open or not _depth:
                _deliver()


def _forget() -> None:
    """In a forked child, where the blocks of other threads never end."""
    global _open, _depth
    _open, _depth = True, 0
    _came.clear()


os.register_at_fork(after_in_child=_forget)
