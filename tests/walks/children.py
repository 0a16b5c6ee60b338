"""Forked child processes, in which memsaver is inactive."""

from __future__ import annotations

import gc
import os
import signal
import time

import memsaver
from memsaver.errors import InvalidStateError

SECONDS = 20.0


def forked(hard: bool, interrupted: type[BaseException]) -> str | None:
    """Fork a child that uses the inactive memsaver and exits; describe any failure.

    Args:
        hard: whether the child exits without a garbage collection, which would run finalizers.
        interrupted: the error that a signal handler raises during the wait, which continues.
    """
    child = os.fork()
    if child == 0:
        _exit(hard)
    end = time.monotonic() + SECONDS
    while True:
        try:
            found, status = os.waitpid(child, os.WNOHANG)
        except interrupted:
            continue
        if found:
            break
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "a forked child did not exit"
        time.sleep(0.002)
    code = os.waitstatus_to_exitcode(status)
    return None if code == 7 else f"a forked child ended with {code}"


def _exit(hard: bool) -> None:
    status = 1
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for call in (memsaver.pause, memsaver.resume):
            try:
                call("a")
            except InvalidStateError:
                status = 7
        if not hard:
            gc.collect()  # runs finalizers, including those of the parent's cycles
    finally:
        os._exit(status)
