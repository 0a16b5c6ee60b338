"""Processes that import the model's memory, write to it on request, and may be killed.

    python -m model.importers FD

The program is their server: it has loaded memsaver without opening the driver, and forks an
importer for each socket that it receives, which is faster than starting a program.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import memsaver
from memsaver import simulator
from memsaver._memory.sharing import exporter, importing, peers, sent_storages

if TYPE_CHECKING:
    from model.expected import Owner

IMPORTERS = 2
SETTLE_SECONDS = 20.0  # the longest wait for another process
REFUSED = 1  # the code of a refused driver call


class _Importer:
    """An importer in its own process: each method handles a request."""

    def __init__(self) -> None:
        self._memories: dict[int, Any] = {}

    def connect(self, endpoint: str) -> int:
        peers.peer_at(endpoint, "")
        return os.getpid()

    def receive(self, key: int, place: tuple[Any, ...], refused: str | None) -> None:
        """Import a sent block, but create no tensor in it, which would need torch."""
        with contextlib.ExitStack() as stack:
            if refused is not None:
                stack.enter_context(simulator.fault(refused, REFUSED, times=0))
            self._memories[key] = importing._memories_at([importing.Place(*place)])[0]

    def digest(self, key: int) -> bytes:
        memory = self._memories[key]
        return hashlib.blake2b(
            (ctypes.c_char * memory.nbytes).from_address(memory.address)
        ).digest()

    def write(self, key: int, start: int, data: bytes) -> None:
        ctypes.memmove(self._memories[key].address + start, data, len(data))

    def release(self, key: int) -> None:
        del self._memories[key]


def _work(connection: Connection) -> None:
    importer = _Importer()
    while True:
        name, *arguments = connection.recv()
        try:
            answer = None, getattr(importer, name)(*arguments)
        except memsaver.MemsaverError as error:
            answer = type(error).__name__, str(error)
        connection.send(answer)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that none stays as a zombie
    while True:
        _, files, *_ = socket.recv_fds(control, 1, 1)
        if not files:  # the model has ended
            return
        if os.fork() == 0:
            control.close()
            try:
                _work(Connection(files[0]))
            except (EOFError, ConnectionError):  # the model has ended
                pass
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(files[0])


class Server:
    """The program above, as the model uses it."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "model.importers", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    def start(self, endpoint: str) -> ImportingProcess:
        """Return a new importer, which is connected to this process's exports."""
        mine, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"1"], [theirs.fileno()])
        return ImportingProcess(Connection(mine.detach()), endpoint)


class ImportingProcess:
    """An importer, as the model uses it."""

    def __init__(self, connection: Connection, endpoint: str) -> None:
        self._connection = connection
        self.pid: int = self.ask("connect", endpoint)

    def ask(self, *request: Any) -> Any:
        """Make a request. Raises the process's MemsaverErrors as errors of the same type."""
        self._connection.send(request)
        if not self._connection.poll(SETTLE_SECONDS):
            raise AssertionError(f"an importer does not answer {request}")
        error, answer = self._connection.recv()
        if error is not None:
            raise getattr(memsaver, error)(answer)
        return answer

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._connection.close()


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Wait for another process. Raises AssertionError if it takes too long."""
    end = time.monotonic() + SETTLE_SECONDS
    while not holds():
        if time.monotonic() > end:
            raise AssertionError(what)
        time.sleep(0.0002)


class Importers:
    """The importing processes, which outlive a sequence unless it kills them.

    Attributes:
        owners: the owners of all blocks that the sequence has sent.
    """

    def __init__(self) -> None:
        self._endpoint = exporter.endpoint()
        self._server = Server()
        self._all: list[ImportingProcess] = []
        self.owners: list[Owner] = []
        for _ in range(IMPORTERS):
            self._all.append(self._server.start(self._endpoint))
        self._wait_for_connections(IMPORTERS)

    def __getitem__(self, importer: int) -> ImportingProcess:
        return self._all[importer]

    def restart(self, importer: int) -> None:
        """Kill an importer, and start another one when its end has been noticed."""
        self._all[importer].kill()
        self._wait_for_connections(IMPORTERS - 1)
        self._all[importer] = self._server.start(self._endpoint)
        self._wait_for_connections(IMPORTERS)

    def _wait_for_connections(self, count: int) -> None:
        connections = exporter._servers[os.getpid()].importers
        wait_until(lambda: len(connections) == count, f"not {count} importers: {connections}")

    def reset(self) -> None:
        """Discard a failed sequence's owners, so that its blocks can be freed by address."""
        if not self.owners:
            return
        for owner in self.owners:
            owner.disown()
        self.owners.clear()
        sent_storages.forget_expired(math.inf)
        for importer in range(IMPORTERS):
            self.restart(importer)


if __name__ == "__main__":
    main()
