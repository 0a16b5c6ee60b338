"""`SharedQuery`: a query whose answer all waiting requests share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

__all__ = ["QUERY_SECONDS", "SharedQuery", "retrieve"]

QUERY_SECONDS = 5.0  # the longest wait for the answer to a query

Result = TypeVar("Result")


def retrieve(task: asyncio.Future[Any]) -> None:
    """Retrieve a task's exception, even if every request that waited for the task was cancelled."""
    if not task.cancelled():
        task.exception()


class SharedQuery(Generic[Result]):
    """A query about an engine's memory, whose answer all waiting requests share.

    A cancelled request does not cancel the query.

    Args:
        send: a function that sends the query and returns the answer.
        logger: the logger for failures.
    """

    def __init__(self, send: Callable[[], Awaitable[Result]], logger: logging.Logger) -> None:
        self._send, self._logger = send, logger
        self._last: asyncio.Future[Result] | None = None

    async def answer(self) -> Result | None:
        """Return the answer; None if the query fails or takes more than 5 s."""
        if self._last is None or self._last.done():
            self._last = asyncio.ensure_future(self._send())
            self._last.add_done_callback(retrieve)
        query = self._last
        await asyncio.wait([query], timeout=QUERY_SECONDS)
        error = query.exception() if query.done() else f"no answer in {QUERY_SECONDS:g} s"
        if error is not None:
            self._logger.warning("the engine did not report its memory: %s", error)
            return None
        return query.result()
