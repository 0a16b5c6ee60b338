"""Threads that run submitted functions one at a time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class Hand:
    """A thread that runs submitted calls.

    `do` runs a call on the thread and waits for the result. `start` and `join` perform the two
    steps separately. Only one thread can submit calls. `start` first joins the previous call.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._busy = False
        threading.Thread(target=self._work, daemon=True).start()

    def do(self, call: Callable[[], Any]) -> Any:
        """Run a call on the thread; return its result or raise its exception."""
        self.start(call)
        return self.join()

    def start(self, call: Callable[[], Any]) -> None:
        self.join()
        self._busy = True
        self._calls.put(call)

    def join(self) -> Any:
        if not self._busy:
            return None
        result, error = self._outcomes.get()
        self._busy = False
        if error is not None:
            raise error
        return result

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            try:
                outcome = call(), None
            except BaseException as error:
                outcome = None, error
            del call
            self._outcomes.put(outcome)


class Here:
    """The calling thread, with the interface of `Hand`."""

    def do(self, call: Callable[[], Any]) -> Any:
        return call()
