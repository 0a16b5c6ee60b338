"""Processes that import memory, write to it on request, and can be killed.

    python -m model.importers FD

The program is the server that forks these processes; see `forked_processes`.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import os
from typing import TYPE_CHECKING, Any

from forked_processes import Forked, Server, serve, wait_until

from memsaver import simulator
from memsaver._memory.sharing import exporter, importing, peers, sent_storages

if TYPE_CHECKING:
    from model.expected import Owner

IMPORTERS = 2
PROGRAM = ("-m", "model.importers")
REFUSED = 1  # the code of a refused driver call


class _Importer:
    """An importer in its own process; each method handles a request."""

    def __init__(self) -> None:
        self._memories: dict[int, Any] = {}

    def connect(self, endpoint: str) -> None:
        peers.peer_at(endpoint, "")

    def has_noticed(self, endpoint: str) -> bool:
        """Return whether this process has noticed an exporter's end or has never known the
        exporter.
        """
        peer = peers._peers.get(endpoint)
        return peer is None or not peer._is_connected

    def receive(self, key: int, place: tuple[Any, ...], refused: str | None) -> None:
        """Import a sent block without creating a tensor, because a tensor would require torch."""
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


class Importers:
    """The importing processes, which outlive a sequence unless the sequence kills them.

    Attributes:
        owners: the owners of all blocks that the sequence has sent.
    """

    def __init__(self) -> None:
        self._endpoint = exporter.endpoint()
        self._server = Server(*PROGRAM)
        self._all: list[Forked] = []
        self.owners: list[Owner] = []
        for _ in range(IMPORTERS):
            self._all.append(self._start())
        self._wait_for_connections(IMPORTERS)

    def __getitem__(self, importer: int) -> Forked:
        return self._all[importer]

    def restart(self, importer: int) -> None:
        """Kill an importer; after the library has noticed the importer's end, start another
        importer.
        """
        self._all[importer].kill()
        self._wait_for_connections(IMPORTERS - 1)
        self._all[importer] = self._start()
        self._wait_for_connections(IMPORTERS)

    def _start(self) -> Forked:
        """Return a new importer that is connected to this process's exports."""
        started = self._server.start()
        started.ask("connect", self._endpoint)
        return started

    def _wait_for_connections(self, count: int) -> None:
        connections = exporter._servers[os.getpid()].importers
        wait_until(lambda: len(connections) == count, f"not {count} importers: {connections}")

    def reset(self) -> None:
        """Discard the owners of a failed sequence, so that the sequence's blocks can be freed by
        address.
        """
        for owner in self.owners:
            owner.disown()
        self.owners.clear()
        sent_storages.forget_expired(math.inf)
        for each in self._all:  # some may have crashed
            each.kill()
        self._wait_for_connections(0)
        self._all = [self._start() for _ in range(IMPORTERS)]
        self._wait_for_connections(IMPORTERS)


if __name__ == "__main__":
    serve(_Importer)
