"""Blocks that defer Python's signal handlers. The file csrc/python/signals.h states the rules.

Signal handlers can raise exceptions (for example on Ctrl-C or an alarm) or pause tags. At an
arbitrary point, such an exception would lose the state of a call in progress, or leave the other
ranks of a collective waiting. A signal that arrives in a block is recorded, and its handler runs
once, at the end of the outermost block.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from memsaver._runtime.native import _C

__all__ = ["collective_block", "interruptible", "signals_deferred"]

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

interruptible = _C.interruptible
"""Runs work with signal handlers enabled, inside `signals_deferred` blocks.

The handlers of earlier signals run first. After the work, or after an exception from a handler,
signals are deferred again.
"""


class signals_deferred(_C.SignalsDeferred, contextlib.ContextDecorator):
    """A block, or a decorator, that defers signal handlers to its end, or to `interruptible` work.

    If a signal arrives while the block is being entered, its handler runs before the block.
    """

    def _recreate_cm(self) -> signals_deferred:
        return signals_deferred()


def collective_block(
    generator: Callable[Arguments, Iterator[Result]],
) -> Callable[Arguments, contextlib.AbstractContextManager[Result]]:
    """Create a context manager that defers signals during its entry and exit, but not in its block.

    If a handler raises at the end of the entry, the exception is raised in the block. In all other
    respects, the function is like `contextlib.contextmanager`.
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
