"""Calls to an engine in this process that run on another thread or on an event loop."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from memsaver._runtime.timeouts import check_timeout, seconds_until
from memsaver.errors import MemsaverError

from .errors import EngineDiedError, EngineError, EngineTimeoutError
from .loops import check_outside_loop

__all__ = ["check_call", "result_of"]

Result = TypeVar("Result")

_POLL_SECONDS = 0.05


def check_call(timeout: float, ended: str, loop: Any = None) -> None:
    """Check that an engine can be called.

    Args:
        timeout: the call's timeout in seconds.
        ended: a description of an engine process that has ended, or "".
        loop: the engine's event loop, if the loop runs the call.

    Raises:
        ConfigError: the timeout is not a positive number.
        EngineDiedError: one of the engine's processes exited.
        EngineError: the event loop is closed.
        InvalidStateError: the calling thread runs an event loop.
    """
    check_timeout(timeout)
    check_outside_loop()
    if loop is not None and loop.is_closed():
        raise EngineError("the engine was shut down")
    if ended:
        raise EngineDiedError(f"the engine is dead: {ended}")


def result_of(
    done: concurrent.futures.Future[Result],
    what: str,
    timeout: float,
    death: Callable[[], str],
    *,
    wait: Callable[[float], object] | None = None,
    kinds: Mapping[str, type[MemsaverError]] | None = None,
) -> Result:
    """Wait for a call, and return its result.

    Args:
        done: the call, which is cancelled after the timeout.
        what: a description of the call, for error messages.
        timeout: seconds to wait.
        death: a function that describes an engine process that has ended, or returns "".
        wait: a function that waits for the call for at most the given seconds; None blocks the
            calling thread.
        kinds: memsaver's errors, keyed by the class names of the engine's errors that they replace.

    Raises:
        EngineTimeoutError: the call did not return in time.
        EngineDiedError: one of the engine's processes exited.
        EngineError: the call raised an exception. memsaver's own errors are raised unchanged.
    """
    deadline = time.monotonic() + timeout
    wait = wait or (lambda seconds: concurrent.futures.wait([done], seconds))
    while not done.done() and time.monotonic() < deadline and not death():
        wait(min(_POLL_SECONDS, seconds_until(deadline)))
    if not done.done():
        done.cancel()
        if ended := death():
            raise EngineDiedError(f"the engine died before it answered {what}: {ended}")
        raise EngineTimeoutError(
            f"the engine did not answer {what} within {timeout:.3g} s; it may be dead or busy"
        )
    try:
        return done.result()
    except MemsaverError:
        raise
    except Exception as error:
        name, ended = type(error).__name__, death()
        kind = EngineDiedError if ended else (kinds or {}).get(name, EngineError)
        raise kind(f"the engine failed during {what}: {ended or f'{name}: {error}'}") from error
