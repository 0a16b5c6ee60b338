"""Calls on other threads."""

from __future__ import annotations

import threading


class Task(threading.Thread):
    """A call on another thread; `join()` returns its result or raises its exception."""

    def __init__(self, function, *arguments, **named) -> None:
        super().__init__(daemon=True)
        self._call = lambda: function(*arguments, **named)
        self._result = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error

    def result(self, timeout: float = 60):
        """Return the call's result or raise its exception."""
        self.join(timeout)
        assert not self.is_alive(), "the thread is stuck"
        if self._error is not None:
            raise self._error
        return self._result
