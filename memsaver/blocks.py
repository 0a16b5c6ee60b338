"""Context managers that are decorators too, and say where they cannot be.

Where a function's body runs after its call has returned (a coroutine, a generator), a decorator
would be around the call and not around the body, which nothing else would show: that is refused. So
is a class, which would no longer be one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar

from memsaver.errors import ConfigError
from memsaver.native import _C

__all__ = ["Block", "block", "check_decorated"]

Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable[..., Any])
Arguments = ParamSpec("Arguments")


class Block(Generic[Value]):
    """A context manager for a block of code, and a decorator for each call of a function.

    May be entered again after it was left. As a decorator it may be used by several threads at
    once.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], contextlib.AbstractContextManager[Value]],
        asynchronous: bool,
    ) -> None:
        self._name = name
        self._make = make
        self._asynchronous = asynchronous
        self._open: list[contextlib.AbstractContextManager[Value]] = []

    # Native, so that no signal handler runs between entering or leaving and recording it.
    __enter__ = _C.enter_interruptibly
    __exit__ = _C.exit

    def _enter(self, place: list[contextlib.AbstractContextManager[Value]]) -> Value:
        manager = self._make()
        place.append(manager)
        value = manager.__enter__()
        self._open.append(manager)
        return value

    def _undo(
        self, place: list[contextlib.AbstractContextManager[Value]], error: BaseException
    ) -> None:
        for manager in place:
            if manager in self._open:
                self._open.remove(manager)
            # A manager that was not entered does nothing here but raise `error` again.
            manager.__exit__(type(error), error, error.__traceback__)

    def _leave(self, *error: Any) -> None:
        if self._open:
            self._open.pop().__exit__(*error)

    def __call__(self, function: Function) -> Function:
        """The function, with the block around each of its calls.

        Raises:
            ConfigError: not a function, or one whose body runs after its call has returned.
        """
        if self._asynchronous and inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with Block(self._name, self._make, True):
                    return await function(*args, **kwargs)

            return awaited  # type: ignore[return-value]
        check_decorated(function, self._name)

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with Block(self._name, self._make, self._asynchronous):
                return function(*args, **kwargs)

        return called  # type: ignore[return-value]


def block(
    generator: Callable[Arguments, Iterator[Value]], asynchronous: bool = False
) -> Callable[Arguments, Block[Value]]:
    """As `contextlib.contextmanager`, for a `Block`.

    Args:
        generator: what is done before its one `yield`, and after it.
        asynchronous: whether it may be around a coroutine's body: it is not a matter of threads.
    """
    manager = contextlib.contextmanager(generator)

    @functools.wraps(generator)
    def made(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Block[Value]:
        return Block(generator.__name__, lambda: manager(*args, **kwargs), asynchronous)

    return made


def check_decorated(function: Any, what: str) -> None:
    """Whether a decorator that is around a call is around what is meant.

    Raises:
        ConfigError: it is not: a coroutine or generator function, a class, or nothing to call.
    """
    name = getattr(function, "__qualname__", None) or type(function).__name__
    if isinstance(function, type):
        raise ConfigError(
            f"{what} decorates functions, and {name} is a class: decorate its __init__, or use "
            "`with` where it is made"
        )
    if not callable(function):
        raise ConfigError(f"{what} decorates functions, and {name} is none")
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    inner = getattr(function, "__call__", None)  # noqa: B004  # of an object: it may be one of these
    if any(kind(part) for kind in kinds for part in (function, inner)):
        raise ConfigError(
            f"{name} runs after its call has returned, outside of what {what} is around: use "
            "`with` inside it, and leave it before each `await` and `yield`"
        )
