"""Ends the processes of an engine, with all processes that they started."""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Descendant", "descendants_of", "kill"]

_SECONDS = 15.0
_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Descendant:
    """A process, which a later process with the same id does not equal.

    Attributes:
        pid: its id.
        born: the time of its start, in the kernel's units.
    """

    pid: int
    born: str

    @property
    def runs(self) -> bool:
        """Whether the process has not ended. A process that ended has released its GPU memory."""
        state, born = _state_of(self.pid)
        return born == self.born and state not in ("Z", "X", "")


def descendants_of(pid: int) -> list[Descendant]:
    """Return the descendants of a process."""
    found: list[Descendant] = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError), open(path) as file:
            for child in map(int, file.read().split()):
                found += [Descendant(child, _state_of(child)[1]), *descendants_of(child)]
    return found


def kill(processes: Sequence[Any], started: Iterable[Descendant] = ()) -> None:
    """End processes of multiprocessing with all their descendants, and wait for their end.

    Args:
        processes: the processes, which may be dead.
        started: further processes to end. A dead process has no descendants any more, although
            those that it started may run.
    """
    others = {one for process in processes for one in descendants_of(process.pid)}.union(started)
    for process in processes:
        process.kill()
    for one in others:
        if one.runs:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one.pid, signal.SIGKILL)
    deadline = time.monotonic() + _SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    while any(one.runs for one in others) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _state_of(pid: int) -> tuple[str, str]:
    """Return a process's state and the time of its start; ("", "") if it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""
