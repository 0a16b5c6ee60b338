"""asyncio event loops, for callers outside the loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from memsaver._runtime.background import start_daemon
from memsaver.errors import InvalidStateError

__all__ = ["LoopThread", "check_outside_loop", "is_in_loop", "settle"]

Result = TypeVar("Result")

_SECONDS = 10.0


def is_in_loop() -> bool:
    """Return whether the calling thread runs an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def check_outside_loop() -> None:
    """Raise `InvalidStateError` if the calling thread runs an event loop, which must not block."""
    if is_in_loop():
        raise InvalidStateError(
            "the controller cannot wait inside an event loop: call it with "
            "`await asyncio.to_thread(...)`"
        )


def settle(done: Future[Result], work: Callable[[], Result]) -> None:
    """Run `work`, and store its result or exception in `done`, unless `done` is cancelled."""
    if not done.set_running_or_notify_cancel():
        return
    try:
        done.set_result(work())
    except BaseException as error:
        done.set_exception(error)


class LoopThread:
    """A thread that runs an event loop until `close` is called.

    Attributes:
        loop: the event loop.
        thread_id: the thread's native id.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = start_daemon("engine-loop", self._run)
        self.thread_id = self._thread.native_id or 0

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the thread, inside the loop, and return its result.

        Exceptions propagate.
        """
        done: Future[Result] = Future()
        self.loop.call_soon_threadsafe(settle, done, work)
        return done.result()

    def close(self) -> None:
        """Cancel the loop's tasks, and end the thread. Waits at most 10 s. Idempotent."""
        if self.loop.is_closed():
            return

        async def cancel() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_SECONDS / 2)
            self.loop.stop()

        self.loop.call_soon_threadsafe(lambda: self.loop.create_task(cancel()))
        self._thread.join(_SECONDS)
        if not self._thread.is_alive():
            self.loop.close()
