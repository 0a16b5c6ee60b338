"""Work that goes on while its caller does something else."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Generic, TypeVar

from memsaver.errors import InvalidStateError, MemsaverWarning
from memsaver.latches import Latch
from memsaver.native import _C, emit_warnings

__all__ = ["Job", "can_start_threads"]

Result = TypeVar("Result")


def can_start_threads() -> bool:
    """Return whether a new thread would run, which is false during interpreter exit.

    Python 3.11 waits for ever for a thread that is started during exit.
    """
    return threading.main_thread().is_alive() and not sys.is_finalizing()


class Outcome(Generic[Result]):
    """What became of a job: shared by its handle and its thread, and owned by both."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.over = Latch()
        self.result: Result | None = None
        self.failure: Failure | None = None


class Failure:
    """An error that somebody must hear of: goes with the outcome, and warns if nobody has."""

    def __init__(self, what: str, error: BaseException) -> None:
        self.what = what
        self.error = error
        self.is_heard = False

    def __del__(self, warn: Callable[..., None] = warnings.warn) -> None:
        if not self.is_heard:
            warn(
                f"{self.what} failed in the background, and nobody asked for its result: "
                f"{self.error!s}",
                MemsaverWarning,
                stacklevel=2,
            )


def _fill(places: list[Outcome[Result]], work: Callable[[], Result]) -> None:
    """Do the work here and put what came of it into the one outcome."""
    result = error = None
    try:
        result = work()
    except BaseException as raised:
        error = raised
    # An error keeps this frame and those below it: none of them may keep the outcome, which must go
    # with its last user.
    outcome = places.pop()
    outcome.result = result
    outcome.failure = Failure(outcome.what, error) if error is not None else None
    outcome.over.open()
    del outcome, error


class Job(Generic[Result]):
    """Work on a thread of its own; the interpreter's exit waits for it. Any thread may use this.

    An error that no `wait` has delivered becomes a `MemsaverWarning` when this object is gone.
    """

    def __init__(
        self,
        name: str,
        what: str,
        work: Callable[[], Result],
        take_over: Callable[[], None] = lambda: None,
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        """Start it.

        Args:
            name: the thread's name, after "memsaver-".
            what: the work in words, for messages.
            work: the work. Done on the calling thread if no thread can be started, because of a
                limit on threads or during interpreter exit.
            take_over: called before the work, on the thread that does it. The garbage collector is
                off until then, because a finalizer on the new thread could wait for a tag that this
                thread owns, while this thread waits for the new one to start.
            let_go: called when `done` is true, on the thread that did the work.
        """
        self._outcome: Outcome[Result] = Outcome(what)
        self._process = os.getpid()
        places = [self._outcome]
        claim = threading.Lock()  # taken by the one thread that does the work

        def run() -> None:
            if claim.acquire(blocking=False):
                try:
                    take_over()
                finally:
                    _C.resume_collection()
                try:
                    _fill(places, work)
                finally:
                    let_go()

        # Explicit, because a daemon thread's new threads are daemons by default.
        thread = threading.Thread(target=run, name=f"memsaver-{name}", daemon=False)

        def start() -> None:
            _C.pause_collection()
            if can_start_threads():
                # After any of these errors the work is done below; `run` does it only once.
                with contextlib.suppress(RuntimeError, MemoryError):
                    thread.start()
                    return
            run()

        _C.uninterrupted(start, True)

    def done(self) -> bool:
        """Whether it is over, well or not. Does not wait."""
        return self._outcome.over.is_open()

    def wait(self, timeout: float | None = None) -> Result:
        """Wait until it is over; its result. May be called more than once.

        Args:
            timeout: wait at most so many seconds.

        Raises:
            TimeoutError: time is up; the work goes on.
            MemsaverError: what the work raised.
        """
        self._wait(None if timeout is None else time.monotonic() + timeout, timeout)
        emit_warnings()
        return self._collected()

    def _wait(self, deadline: float | None, timeout: float | None) -> None:
        """Until it is over. Raises TimeoutError; and what only this waiting is refused for."""
        if not self._over_within(None if deadline is None else deadline - time.monotonic()):
            raise self._too_late(timeout)

    def _over_within(self, seconds: float | None) -> bool:
        self._check_process()
        return self._outcome.over.wait(seconds)

    def _check_process(self) -> None:
        if not self.done() and os.getpid() != self._process:
            raise InvalidStateError(
                f"{self._outcome.what} is the parent process's: a forked child cannot wait for it"
            )

    def _too_late(self, timeout: float | None) -> TimeoutError:
        return TimeoutError(
            f"{self._outcome.what} is not over after {timeout:g} s; it goes on: wait again"
        )

    def _collected(self) -> Result:
        outcome = self._outcome
        if outcome.failure is not None:
            outcome.failure.is_heard = True
            raise outcome.failure.error
        return outcome.result  # type: ignore[return-value]  # filled where there is no error
