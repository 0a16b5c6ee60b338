"""Faults of driver calls, and checks of the state afterwards."""

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
    """Makes the nth call of that name from now on fail, and `times` calls in total; 0 means all."""

    call: str
    nth: int
    times: int
    code: int

    def __str__(self):
        often = "once" if self.times else "from then on"
        return f"{self.call} number {self.nth} fails {often} with {self.code}"


class Fixed:
    """Blocks whose contents are checked often: the expected bytes are computed once."""

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
    """Return the device memory of all tags; it equals the driver's figure if nothing leaks."""
    return memsaver.stats().resident_bytes


def fill_device(sim, free):
    """Make another process allocate all device memory except `free` bytes."""
    sim.occupy(0)
    sim.occupy(memsaver.device_memory(0)[0] - free)


def states(names):
    return {str(memsaver.state(name)) for name in names}


def each_fault(sim, in_thread, before, action, code):
    """Yield every fault that can occur in an action, after counting the action's driver calls.

    `before` prepares the state, for the count and again for each fault. The action runs on its own
    thread, so that a context that could not be popped affects no other test.
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
