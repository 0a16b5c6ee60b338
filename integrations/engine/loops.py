"""Event loops of asyncio, for callers outside of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from memsaver._runtime.interrupts import signals_deferred
from memsaver._runtime.latches import Latch
from memsaver.errors import InvalidStateError

__all__ = ["LoopThread", "check_outside_loop"]

Result = TypeVar("Result")

_SECONDS = 10.0


def check_outside_loop() -> None:
    """Raise `InvalidStateError` if the calling thread runs an event loop, which cannot wait."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise InvalidStateError(
        "the controller cannot wait inside an event loop: call it with "
        "`await asyncio.to_thread(...)`"
    )


class LoopThread:
    """A thread that runs an event loop until `close`.

    Attributes:
        loop: the event loop.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="memsaver-engine-loop", daemon=True)
        with signals_deferred():
            self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def run(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work`, which runs on the thread, inside the loop.

        Exceptions propagate.
        """
        results: list[Result] = []
        errors: list[BaseException] = []
        done = Latch()

        def call() -> None:
            try:
                results.append(work())
            except BaseException as error:
                errors.append(error)
            finally:
                done.open()

        self.loop.call_soon_threadsafe(call)
        done.wait(None)
        if errors:
            raise errors.pop()
        return results[0]

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
