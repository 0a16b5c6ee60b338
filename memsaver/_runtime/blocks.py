"""Context managers that are also decorators and reject functions that they cannot decorate.

The body of a coroutine function or a generator function runs after its call has returned. A
decorator would silently apply to the call and not to the body, so decorating such a function is an
error. Decorating a class is also an error, because the result would not be a class.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar

from memsaver._runtime.native import _C
from memsaver.errors import ConfigError

__all__ = ["Block", "block", "check_decorated"]

Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable[..., Any])
Arguments = ParamSpec("Arguments")


class Block(Generic[Value]):
    """A context manager for a block of code, and a decorator that enters it for each call.

    The block can be entered again after it has ended. Several threads can call a decorated function
    at the same time.
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

    # Native, so that no signal handler runs between entering or leaving the block and recording
    # that.
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
            # A manager that was not entered merely raises `error` again.
            manager.__exit__(type(error), error, error.__traceback__)

    def _leave(self, *error: Any) -> None:
        if self._open:
            self._open.pop().__exit__(*error)

    def __call__(self, function: Function) -> Function:
        """Return a function that enters the block for each call of `function`.

        Raises:
            ConfigError: the object is not a function, or its body runs after the call has returned.
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
    """Turn a generator function into one that returns a `Block`, like `contextlib.contextmanager`.

    Args:
        generator: a generator function with the code before the block, one `yield`, and the code
            after the block.
        asynchronous: whether the block may decorate coroutine functions. This must be False if the
            block depends on the current thread.
    """
    manager = contextlib.contextmanager(generator)

    @functools.wraps(generator)
    def made(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Block[Value]:
        return Block(generator.__name__, lambda: manager(*args, **kwargs), asynchronous)

    return made


def check_decorated(function: Any, what: str) -> None:
    """Check that a decorator around a function's call also covers the function's body.

    Raises:
        ConfigError: the object is a coroutine function, a generator function or a class, or is not
            callable.
    """
    name = getattr(function, "__qualname__", None) or type(function).__name__
    if isinstance(function, type):
        raise ConfigError(
            f"{what} decorates functions, and {name} is a class: decorate its __init__, or use "
            "`with` where it is created"
        )
    if not callable(function):
        raise ConfigError(f"{what} decorates functions, and {name} is not a function")
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    inner = getattr(function, "__call__", None)  # noqa: B004  # may be a coroutine function
    if any(kind(part) for kind in kinds for part in (function, inner)):
        raise ConfigError(
            f"{name} runs after its call has returned, so {what} would not cover it: use "
            "`with` inside it, and leave it before each `await` and `yield`"
        )
