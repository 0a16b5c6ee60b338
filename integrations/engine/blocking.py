"""Runs coroutines for callers without an event loop, such as an engine with blocking calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from memsaver._runtime.background import start_daemon

from .loops import is_in_loop, settle

__all__ = ["run"]

_Result = TypeVar("_Result")


def run(work: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
    """Run a coroutine to completion, and return its result.

    The coroutine runs on the calling thread. If that thread already runs an event loop, as in a
    notebook, the coroutine runs on another thread. Unlike `asyncio.run`, this function leaves the
    thread's current event loop unchanged. An interrupt cancels the coroutine.
    """
    loop = asyncio.new_event_loop()
    if not is_in_loop():
        return _run(loop, work)
    done: Future[_Result] = Future()
    try:
        start_daemon("blocking", lambda: settle(done, lambda: _run(loop, work)))
        return done.result()
    finally:
        if done.cancel():  # the thread has not started the work
            loop.close()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_cancel_all, loop)
            wait([done])  # even after an interrupt: two threads must not call the engine at once


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()


def _run(
    loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, _Result]]
) -> _Result:
    try:
        return loop.run_until_complete(work())
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.close()
