"""A tag on simulated device 0 with a backup on another device, for a test's child process."""

from __future__ import annotations

from collections.abc import Callable

from simulated_driver import Block, Simulator

import memsaver
from memsaver._runtime.native import _C

CODE = """
import memsaver
from memsaver._runtime.native import _C
from memsaver.errors import *
from peer_scene import *
"""

MIB = 1 << 20
GIB = 1 << 30
CAPACITY = 80 * GIB


def fails(kind: type[Exception], call: Callable[[], object] = lambda: memsaver.pause("t")):
    """Return the error of a call that must fail; by default, the call is a pause."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError("no error")


class Scene:
    """Blocks in tag "t" on device 0 and their backup; `margin` bytes stay free on device 1."""

    def __init__(self, sizes: list[int], devices: int = 2, margin: int = 0) -> None:
        self.sim = Simulator()
        memsaver.configure(peer_margin_bytes=margin)
        for device in range(devices):
            self.sim.start(device)
        self._seed = 0
        with memsaver.region("t", backup="peer"):
            self.blocks = [Block(self.sim, nbytes, self._next(), 0) for nbytes in sizes]

    def _next(self) -> int:
        self._seed += 1
        return self._seed

    @property
    def row(self) -> memsaver.TagStats:
        (row,) = memsaver.stats()["t"]
        return row

    def on_neighbour(self, device: int = 1) -> int:
        """Return the memory on device 1 that contains the backup, as the driver counts it."""
        return self.sim.tag_bytes(device)

    def leave_free(self, nbytes: int, device: int = 1) -> None:
        """Make another process allocate all memory of a device except `nbytes` bytes."""
        self.sim.occupy(CAPACITY - self.sim.physical(device) - nbytes, device)

    def rewrite(self, index: int) -> None:
        """Fill a block with different contents."""
        self.blocks[index].fill(self._next())

    def check(self) -> None:
        """Check that the contents are intact, no driver rule is violated, and the statistics are
        correct.
        """
        assert memsaver.state("t") == "mapped" and all(b.is_intact() for b in self.blocks)
        assert self.row.peer_bytes == memsaver.stats().peer_bytes == self.on_neighbour()
        assert self.sim.tag_bytes(0) == self.row.resident_bytes
        assert self.sim.violations() == []

    def check_freed(self) -> None:
        """Free the blocks and the backup, and check that no memory remains on either device."""
        self.blocks.clear()
        memsaver.trim(wait=True)
        row = self.row
        assert row.peer_bytes == row.host_bytes == 0
        assert _C.deferred_releases()[0] == 0
        assert self.sim.tag_bytes(0) == self.on_neighbour() == 0
