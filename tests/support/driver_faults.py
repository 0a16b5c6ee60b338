"""Failing driver calls, and checks of the state after the failure."""

from __future__ import annotations

import dataclasses
import re

from repository import ROOT

import memsaver
from memsaver.errors import DriverError, OutOfDeviceMemoryError, OutOfHostMemoryError

PAGE = 2 << 20
CODES = {"out of memory": 2, "invalid value": 1, "launch failed": 719}
TYPED = (DriverError, OutOfDeviceMemoryError, OutOfHostMemoryError)

# Every entry point that the library uses, so that tests also fail calls that are added later.
DRIVER_CALLS = re.findall(r"X\((cu\w+)\)", (ROOT / "csrc/core/driver/driver.h").read_text())


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault: the nth call to a driver function fails; `times` calls fail in total (0: all)."""

    call: str
    nth: int
    times: int
    code: int

    def __str__(self):
        often = "once" if self.times else "from then on"
        return f"{self.call} number {self.nth} fails {often} with {self.code}"


class Fixed:
    """Blocks whose expected bytes are computed only once, because tests check the bytes often."""

    def __init__(self, sim, blocks):
        self.sim = sim
        self.blocks = list(blocks)
        self.contents = [b.expected() for b in self.blocks]

    def fill(self):
        for block, content in zip(self.blocks, self.contents, strict=True):
            self.sim.write(block.address, content)

    def are_intact(self):
        pairs = zip(self.blocks, self.contents, strict=True)
        return all(self.sim.contains(block.address, content) for block, content in pairs)

    def are_zero(self):
        return all(block.is_zero() for block in self.blocks)

    def are_gone(self):
        return not any(self.sim.accessible(block.address) for block in self.blocks)


def held(names):
    """Return the device memory that the library reports for these tags."""
    return sum(row.resident_bytes for row in memsaver.stats().tags if row.tag in names)


def reported():
    """Return all tags' device memory, which equals the driver's value if nothing has leaked."""
    return memsaver.stats().resident_bytes


def fill_device(sim, free):
    """Make another process allocate all device memory except `free` bytes."""
    sim.occupy(0)
    sim.occupy(memsaver.device_memory(0)[0] - free)


def states(names):
    return {str(memsaver.state(name)) for name in names}


def each_fault(sim, in_thread, before, action, code):
    """Yield each fault that can occur in an action, after a first run has counted the driver calls.

    `before` prepares the state before the first run and before each fault. The action runs on its
    own thread, because a context that could not be popped must not affect other tests.
    """
    before()
    calls = {name: sim.calls(name) for name in DRIVER_CALLS}
    in_thread(action).result()
    made = {name: sim.calls(name) - calls[name] for name in DRIVER_CALLS}
    assert any(made.values()), "the action makes no driver call"
    for name, count in made.items():
        for nth in range(1, count + 1):
            for times in (1, 0):
                before()
                yield Fault(name, nth, times, code)
