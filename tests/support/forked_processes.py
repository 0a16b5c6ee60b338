"""Forked child processes that answer a test program's requests one at a time.

Each kind of process has its own program, which runs as the server. The server loads the required
modules without opening the driver, and forks a process for each socket that it receives. A fork is
faster than starting a program.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import memsaver

SETTLE_SECONDS = 20.0  # the longest wait for another process


def serve(make_worker: Callable[[], Any]) -> None:
    """Run a server until the caller exits; the program's argument is the server's socket.

    Args:
        make_worker: a function that creates an object in a forked process; the object's methods
            answer the requests.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that none stays as a zombie
    while True:
        _, files, *_ = socket.recv_fds(control, 1, 1)
        if not files:  # the caller has ended
            return
        if os.fork() == 0:
            control.close()
            try:
                _work(make_worker(), Connection(files[0]))
            except (EOFError, ConnectionError):  # the caller has ended
                pass
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(files[0])


def _work(worker: Any, connection: Connection) -> None:
    connection.send(os.getpid())
    while True:
        name, *arguments = connection.recv()
        try:
            answer = None, getattr(worker, name)(*arguments)
        except memsaver.MemsaverError as error:
            answer = type(error).__name__, str(error)
        connection.send(answer)


class Server:
    """The caller's handle to a server.

    Args:
        program: the Python arguments that run the server's program.
    """

    def __init__(self, *program: str) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, *program, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    def start(self) -> Forked:
        """Start and return a new process."""
        mine, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"1"], [theirs.fileno()])
        return Forked(Connection(mine.detach()))


class Forked:
    """The caller's handle to a forked process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.pid: int = self._receive("its start")

    def ask(self, *request: Any) -> Any:
        """Make a request and return the answer.

        Raises the process's MemsaverErrors as errors of the same type.
        """
        self.begin(*request)
        return self.finish(request)

    def begin(self, *request: Any) -> None:
        """Begin a request; `finish` returns the answer."""
        self._connection.send(request)

    def finish(self, request: Any) -> Any:
        """Return the answer to a request that has begun. Raises the same errors as `ask`."""
        error, answer = self._receive(request)
        if error is not None:
            raise getattr(memsaver, error)(answer)
        return answer

    def _receive(self, request: Any) -> Any:
        if not self._connection.poll(SETTLE_SECONDS):
            raise AssertionError(f"a process does not answer {request}")
        try:
            return self._connection.recv()
        except (EOFError, ConnectionError):
            raise AssertionError(f"a process ended instead of answering {request}") from None

    def kill(self) -> None:
        """Kill the process if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._connection.close()


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Wait until a condition in another process is true. Raises AssertionError after a timeout."""
    end = time.monotonic() + SETTLE_SECONDS
    while not holds():
        if time.monotonic() > end:
            raise AssertionError(what)
        time.sleep(0.0002)
