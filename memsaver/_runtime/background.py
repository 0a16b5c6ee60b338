"""Background jobs, which run work on a separate thread while the caller continues."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

from memsaver._runtime.latches import Latch
from memsaver._runtime.native import _C, emit_warnings
from memsaver.errors import ConfigError, InvalidStateError, MemsaverWarning

__all__ = ["Job", "can_start_threads", "start_daemon"]

Result = TypeVar("Result")


def can_start_threads() -> bool:
    """Return whether a new thread would run. False during interpreter exit.

    Python 3.11 waits indefinitely for a thread that is started during exit.
    """
    return threading.main_thread().is_alive() and not sys.is_finalizing()


def start_daemon(
    name: str,
    work: Callable[[], object],
    within: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
) -> threading.Thread:
    """Start a daemon thread for `work`, which must not raise. Safe in callbacks.

    The garbage collector is disabled until the new thread runs. Otherwise, a finalizer on the new
    thread could wait for a tag that this thread owns, while this thread waits for the new thread to
    start.

    Args:
        name: the part of the thread's name after "memsaver-".
        work: the function to run on the thread.
        within: a function that returns a context manager for the work. The garbage collector stays
            disabled until this context manager is entered.

    Raises:
        RuntimeError, MemoryError: no thread can be started.
    """

    def run() -> None:
        with within():
            _C.resume_collection()
            work()

    thread = threading.Thread(target=run, name=f"memsaver-{name}", daemon=True)

    def start() -> None:
        _C.pause_collection()
        try:
            thread.start()
        except BaseException:
            _C.resume_collection()
            raise

    _C.uninterrupted(start, True)
    return thread


class Outcome(Generic[Result]):
    """The result or the error of a job. The job's handle and its thread own this object."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.over = Latch()
        self.result: Result | None = None
        self.failure: Failure | None = None


class Failure:
    """A job's error, which emits a warning if it is deleted before a caller receives it."""

    def __init__(self, what: str, error: BaseException) -> None:
        self.what = what
        self.error = error
        self.is_delivered = False

    def __del__(self, warn: Callable[..., None] = warnings.warn) -> None:
        if not self.is_delivered:
            warn(
                f"{self.what} raised an error in the background, and its result was never "
                f"requested: {self.error!s}",
                MemsaverWarning,
                stacklevel=2,
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _fill(places: list[Outcome[Result]], work: Callable[[], Result]) -> None:
    """Run the work on this thread, and store its outcome in the only element of `places`."""
    result = error = None
    try:
        result = work()
    except BaseException as raised:
        error = raised
    # An error keeps this frame and the frames below it alive, so no frame may keep a reference to
    # the outcome, which must be deleted with its last user.
    outcome = places.pop()
    outcome.result = result
    outcome.failure = Failure(outcome.what, error) if error is not None else None
    outcome.over.open()
    del outcome, error


class Job(Generic[Result]):
    """Work on a separate thread, for which interpreter exit waits. Thread-safe.

    If the work fails and no `wait` call raises its error, a `MemsaverWarning` reports the error
    when this object is deleted.
    """

    def __init__(
        self,
        name: str,
        what: str,
        work: Callable[[], Result],
        acquire: Callable[[], None] = lambda: None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the work.

        Args:
            name: the part of the thread's name after "memsaver-".
            what: a description of the work, for messages.
            work: the function to run. If no thread can be started, because of a limit on threads or
                during interpreter exit, the calling thread runs the function.
            acquire: a function that is called before the work, on the same thread. Until `acquire`
                returns, the garbage collector is disabled. Otherwise, a finalizer on the new thread
                could wait for a tag that this thread owns, while this thread waits for the new
                thread to start.
            release: a function that is called when `done` is true, on the thread that ran the work.
        """
        self._outcome: Outcome[Result] = Outcome(what)
        self._process = os.getpid()
        places = [self._outcome]
        claim = threading.Lock()  # acquired by the thread that runs the work

        def run() -> None:
            if claim.acquire(blocking=False):
                try:
                    acquire()
                finally:
                    _C.resume_collection()
                try:
                    _fill(places, work)
                finally:
                    release()

        # Explicit, because a daemon thread's new threads are daemons by default.
        thread = threading.Thread(target=run, name=f"memsaver-{name}", daemon=False)

        def start() -> None:
            _C.pause_collection()
            if can_start_threads():
                # After these errors, this thread runs the work below; `run` runs it only once.
                with contextlib.suppress(RuntimeError, MemoryError):
                    thread.start()
                    return
            run()

        _C.uninterrupted(start, True)

    def done(self) -> bool:
        """Return whether the work has ended, with or without an error. Does not wait."""
        return self._outcome.over.is_open()

    def wait(self, timeout: float | None = None) -> Result:
        """Wait for the work to end, and return its result. Can be repeated.

        Args:
            timeout: the maximum time to wait, in seconds; None means no limit.

        Raises:
            ConfigError: the timeout is not a number.
            TimeoutError: the work did not end within the timeout, and continues.
            MemsaverError: the error that the work raised.
        """
        return self._waited(timeout)

    def _waited(self, timeout: float | None) -> Result:
        """Wait, and emit warnings that point to the caller of the public method."""
        if timeout is not None and not _is_number(timeout):
            raise ConfigError(f"timeout must be a number of seconds or None, not {timeout!r}")
        self._wait(None if timeout is None else time.monotonic() + timeout, timeout)
        if self._outcome.failure is None:
            emit_warnings(stacklevel=4)
        else:  # warnings treated as errors do not replace the job's own error
            with contextlib.suppress(Warning):
                emit_warnings(stacklevel=4)
        return self._collected()

    def _wait(self, deadline: float | None, timeout: float | None) -> None:
        """Wait for the work to end. Raises TimeoutError, or an error of the wait itself."""
        if not self._over_within(None if deadline is None else deadline - time.monotonic()):
            raise self._too_late(timeout)

    def _over_within(self, seconds: float | None) -> bool:
        self._check_process()
        return self._outcome.over.wait(seconds)

    def _check_process(self) -> None:
        if not self.done() and os.getpid() != self._process:
            raise InvalidStateError(
                f"{self._outcome.what} belongs to the parent process: a forked child cannot "
                "wait for it"
            )

    def _too_late(self, timeout: float | None) -> TimeoutError:
        return TimeoutError(
            f"{self._outcome.what} has not ended after {timeout:g} s and continues: wait again"
        )

    def _collected(self) -> Result:
        outcome = self._outcome
        if outcome.failure is not None:
            outcome.failure.is_delivered = True
            raise outcome.failure.error
        return outcome.result  # type: ignore[return-value]  # set if there is no error
