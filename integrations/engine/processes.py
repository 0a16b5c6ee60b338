"""Starts an engine's processes on a thread, tracks them, and kills them."""

from __future__ import annotations

import contextlib
import glob
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from memsaver._runtime.background import start_daemon
from memsaver._runtime.latches import Latch
from memsaver._runtime.timeouts import seconds_until

from .loops import settle

__all__ = ["Descendant", "Parent", "Processes", "death_among", "descendants_of", "kill"]

Result = TypeVar("Result")

_SECONDS = 15.0
_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Descendant:
    """A process, identified by its id and its start time, because ids are reused.

    Attributes:
        pid: the process's id.
        born: the time at which the process started, in the kernel's units.
    """

    pid: int
    born: str

    @property
    def runs(self) -> bool:
        """Whether the process is running. A process that has ended has released its GPU memory."""
        state, born = _state_of(self.pid)
        return born == self.born and state not in ("Z", "X", "")


class Parent:
    """A thread that starts processes, and runs until `end` is called.

    An engine's processes request that Linux kill them when their parent dies. Linux treats the
    thread that started a process as the parent. The main thread lives as long as its process.
    """

    def __init__(self) -> None:
        self._ended = Latch()
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], Result]) -> Result:
        """Run the work on this thread, and return its result.

        If the caller is the main thread, the work runs on the main thread. Call this method once.
        Exceptions propagate.
        """
        if threading.current_thread() is threading.main_thread():
            return work()
        done: Future[Result] = Future()

        def live() -> None:
            settle(done, work)
            if done.exception() is None:
                self._ended.wait(None)

        self._thread = start_daemon("engine-parent", live)
        return done.result()

    def end(self) -> None:
        """Stop the thread. Linux kills the remaining processes that the thread started."""
        self._ended.open()
        if self._thread is not None:
            self._thread.join(_SECONDS)


class Processes:
    """The `multiprocessing` processes that a thread has started since this object was created.

    Args:
        thread_id: the thread's native id.
    """

    def __init__(self, thread_id: int) -> None:
        self._thread_id = thread_id
        self._found: list[Any] = []
        self._descendants: set[Descendant] = set()
        self._before = self._children()

    def _children(self) -> list[Any]:
        # Other threads may start processes at the same time, but Linux knows which thread started
        # each process.
        pids = _children_of(f"/proc/self/task/{self._thread_id}/children")
        return [child for child in multiprocessing.active_children() if child.pid in pids]

    def record(self) -> None:
        """Record the processes and their descendants.

        This allows `end` to kill even the descendants of processes that have since exited.
        """
        self._found = [child for child in self._children() if child not in self._before]
        for child in self._found:
            self._descendants.update(descendants_of(child.pid))

    def end(self) -> None:
        """Kill the recorded processes and all their descendants. Idempotent."""
        kill(self._found, self._descendants)


def death_among(processes: Iterable[Any]) -> str:
    """Describe the first of an engine's processes that has exited; "" if none has exited."""
    for process in processes:
        if not process.is_alive():
            return f"its process {process.pid} exited with status {process.exitcode}"
    return ""


def descendants_of(pid: int) -> list[Descendant]:
    """Return the descendants of a process."""
    found: list[Descendant] = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        for child in _children_of(path):
            found += [Descendant(child, _state_of(child)[1]), *descendants_of(child)]
    return found


def _children_of(path: str) -> list[int]:
    """Return the children of a thread, read from /proc; [] if the thread has ended."""
    try:
        with open(path) as file:
            return [int(text) for text in file.read().split()]
    except OSError:
        return []


def kill(processes: Sequence[Any], started: Iterable[Descendant] = ()) -> None:
    """Kill `multiprocessing` processes and all their descendants, and wait until they have exited.

    Args:
        processes: the processes, which may be dead.
        started: additional processes to kill. A dead process has no descendants, but processes that
            it started may still be running.
    """
    # The id of a process that has exited may belong to a new process.
    alive = [process for process in processes if process.is_alive()]
    others = {one for process in alive for one in descendants_of(process.pid)}.union(started)
    for process in processes:
        process.kill()
    for one in others:
        if one.runs:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one.pid, signal.SIGKILL)
    deadline = time.monotonic() + _SECONDS
    for process in processes:
        process.join(seconds_until(deadline))
    while any(one.runs for one in others) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _state_of(pid: int) -> tuple[str, str]:
    """Return a process's state and start time; ("", "") if the process has exited."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""
