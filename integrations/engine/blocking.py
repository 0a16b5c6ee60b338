"""Runs coroutines for callers without an event loop, such as an engine with blocking calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from .loops import is_in_loop

__all__ = ["run"]

_Result = TypeVar("_Result")


def run(work: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
    """Run a coroutine to its end, and return its result.

    The calling thread runs it, unless it has a running event loop, as in a notebook: then another
    thread runs it. Does not change the thread's current event loop, as `asyncio.run` does.
    """
    if not is_in_loop():
        return _run(work)
    with ThreadPoolExecutor(1, thread_name_prefix="memsaver") as pool:
        return pool.submit(_run, work).result()


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
