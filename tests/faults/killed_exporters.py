"""Imports from processes that are killed, and the release of the imported memory, under faults.

The faults are injected into this process. Each attempt uses new exporters, which are forked from a
server.
"""

from __future__ import annotations

import os
import random
import threading
from typing import Any, ClassVar

from exporting_processes import PROGRAM, Exporter
from forked_processes import Server, wait_until

from faults.machine import Machine
from faults.scenario import SMALL_GRANULE, Scenario, require
from memsaver._memory.sharing import importing, peers

_SIZES = [4096, SMALL_GRANULE + 512]  # in two extents


class _Peer(peers.Peer):
    """A connection that records its thread, and whether a release was attempted after the end."""

    threads: ClassVar[dict[str, threading.Thread]] = {}  # by endpoint: the last to use the peer
    has_tried = False

    def _run(self) -> None:
        self.threads[self.endpoint] = threading.current_thread()
        super()._run()

    def _release(self, extents: list[Any]) -> None:
        super()._release(extents)
        self.has_tried = not self._is_connected


class _Source:
    """Blocks of another process and, after an import, their memory in this process."""

    def __init__(self, server: Server, seed: str) -> None:
        self.exporter = Exporter(server.start())
        self.contents = [random.Random(f"{seed} {n}").randbytes(n) for n in _SIZES]
        ask = self.exporter.process.ask
        ask("use_granularity", SMALL_GRANULE)
        self.places = [ask("send", key, 0, data) for key, data in enumerate(self.contents)]
        self.memories: list[Any] = []

    def receive(self) -> None:
        self.memories = importing._memories_at([importing.Place(*each) for each in self.places])

    def peer(self) -> Any:
        """Return the connection to the exporter, or None."""
        return peers._peers.get(self.exporter.endpoint)

    def is_gone(self) -> bool:
        """Return whether the exporter was never connected or its connection has ended."""
        thread = _Peer.threads.get(self.exporter.endpoint)
        return thread is None or not thread.is_alive()

    def wait_for_the_end(self) -> None:
        """Wait until this process notices the exporter's end.

        Must be called while some of the exporter's memory is in use.
        """
        wait_until(lambda: self.peer().has_tried, "the end of an exporter is not noticed")

    def wait_for_release(self) -> None:
        """Wait until the exporter's memory is released or the driver has refused to release it."""

        def is_over() -> bool:
            peer = self.peer()
            return self.is_gone() if peer is None else peer.has_tried and bool(peer.extents)

        wait_until(is_over, "memory of an exporter that has ended is not released")


class _FromKilled(Scenario):
    """The base class of scenarios in which this process uses memory of an exporter that is
    killed.
    """

    granule = SMALL_GRANULE

    def build(self) -> None:
        super().build()
        peers.Peer = _Peer  # type: ignore[misc]
        self.server = Server(*PROGRAM)
        self.started = 0
        self.sources: list[_Source] = []  # of the current attempt

    def start(self) -> _Source:
        self.started += 1
        self.sources.append(_Source(self.server, f"{self.name} {self.started}"))
        return self.sources[-1]

    def check_contents(self, source: _Source) -> None:
        """Check that memory in use has the exporter's contents, then change the contents."""
        self.check_bystander()
        for i, (memory, expected) in enumerate(zip(source.memories, source.contents, strict=True)):
            found = self.sim.read(memory.address, memory.nbytes)
            require(found == expected, "imported memory has wrong contents")
            source.contents[i] = expected[::-1]
            self.sim.write(memory.address, source.contents[i])

    def check_killed(self, source: _Source) -> None:
        """Kill the exporter while this process uses its memory; check that the contents remain."""
        self.check_contents(source)
        source.exporter.kill()
        self.check_contents(source)
        source.wait_for_the_end()
        self.check_contents(source)
        require(source.exporter.has_memory_in(os.getpid()), "imported memory is not mapped")

    def rest(self) -> None:
        for source in self.sources:
            source.memories.clear()
            if not source.exporter.is_dead:  # even if it has ended itself
                source.exporter.kill()
        for source in self.sources:
            wait_until(source.is_gone, "memory of an exporter that has ended stays mapped")
        _Peer.threads.clear()
        super().rest()
        for source in self.sources:
            require(
                not source.exporter.has_memory_in(os.getpid()),
                "released memory is still open or mapped",
            )
        self.sources.clear()


class Import(_FromKilled):
    """An import from an exporter that is killed while its memory is in use.

    With `answers`, an import from another exporter precedes this import. The other exporter exits
    after this number of answers.
    """

    def __init__(self, machine: Machine, name: str, answers: int | None = None) -> None:
        super().__init__(machine, name)
        self.answers = answers

    def prepare(self) -> None:
        self.source = self.start()
        self.ending = None if self.answers is None else self.start()
        if self.ending is not None:
            self.ending.exporter.end_after(self.answers)

    def act(self) -> None:
        if self.ending is not None:
            error = ""
            try:
                self.ending.receive()
            except self.memsaver.SharingError as caught:
                error = str(caught)
            require("has ended" in error, f"an import from an ended exporter raised {error!r}")
            self.ending.wait_for_release()
        self.source.receive()

    def check_unchanged(self, error: Exception) -> None:
        self.check_bystander()
        ask = self.source.exporter.process.ask
        wait_until(lambda: ask("held") == 0, "an exporter keeps memory for a failed import")
        wait_until(lambda: not ask("importers"), "a failed import is recorded")
        peer = self.source.peer()
        require(peer is None or not peer.extents, "a failed import left memory mapped")

    def check_done(self) -> None:
        self.check_killed(self.source)


class Release(_FromKilled):
    """The release of a killed exporter's memory, which never fails for its caller."""

    def prepare(self) -> None:
        self.source = self.start()
        self.source.receive()
        self.check_killed(self.source)
        self.source.peer().has_tried = False

    def act(self) -> None:
        self.source.memories.clear()
        self.source.wait_for_release()

    def check_unchanged(self, error: Exception) -> None:
        raise error

    def check_done(self) -> None:
        self.check_bystander()
        wait_until(lambda: not self.source.peer(), "memory of a killed exporter stays mapped")
