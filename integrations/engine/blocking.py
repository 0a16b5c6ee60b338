"""Runs coroutines for callers without an event loop, such as an engine with blocking calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from memsaver._runtime.background import start_daemon

from .loops import is_in_loop, settle

__all__ = ["run"]

_Result = TypeVar("_Result")


def run(work: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
    """Run a coroutine to its end, and return its result.

    The calling thread runs it, unless it has a running event loop, as in a notebook: then another
    thread runs it. Unlike `asyncio.run`, this leaves the thread's current event loop unchanged.
    """
    if not is_in_loop():
        return _run(work)
    done: Future[_Result] = Future()
    thread = start_daemon("blocking", lambda: settle(done, lambda: _run(work)))
    try:
        return done.result()
    finally:
        thread.join()  # also after an interrupt, because engines with blocking calls use one thread


def _run(work: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(work())
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.close()
