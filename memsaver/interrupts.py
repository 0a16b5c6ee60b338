"""Blocks in which Python's signal handlers do not run: `csrc/python/signals.h` has the rules.

An exception out of a handler (Ctrl-C, an alarm, a preemption handler that pauses) at a random place
would lose what the code there has begun, or let the other ranks of a collective call wait for this
one. In a block a signal is noted, and its handler runs once at the end of the outermost block.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from memsaver.native import _C

__all__ = ["collective_block", "interruptible", "interrupts_deferred", "signals_deferred"]

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

interruptible = _C.interruptible
"""Does work with signal handlers running, in spite of `signals_deferred` blocks around it.

The handlers of signals that came before run first. After an exception out of a handler, and after
the work, they are deferred again.
"""


class interrupts_deferred(_C.SignalsDeferred):
    """Run SIGINT's handler at the end of the block, and never within; other signals are not kept.

    An interrupt on the way into the block is raised there.
    """

    def __init__(self) -> None:
        _C.SignalsDeferred.__init__(self, interrupts_alone=True)


class signals_deferred(_C.SignalsDeferred, contextlib.ContextDecorator):
    """Run signal handlers at the end of the block, or in `interruptible` work. A decorator too.

    A signal on the way into the block is handled there.
    """

    def _recreate_cm(self) -> signals_deferred:
        return signals_deferred()


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
