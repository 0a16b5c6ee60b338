"""Controls a worker's simulated driver and system: counts calls, makes them fail, compares
counters.
"""

from __future__ import annotations

import ctypes
import os
import random
import time
from typing import Any

from simulated_driver import Simulator

from faults.injections import DRIVER_CALLS, OS_CALLS, Injection

MIB = 1 << 20


class Machine:
    """The machine of a process that has os_faults preloaded. `start` starts its driver."""

    def __init__(self) -> None:
        import memsaver
        from memsaver import simulator  # noqa: F401 - as memsaver.simulator

        self.memsaver = memsaver
        self.os = ctypes.CDLL(None)
        self.os.os_faults_calls.restype = ctypes.c_uint64
        self.os.os_faults_clear.restype = ctypes.c_uint64
        self.os.os_faults_mapped_bytes.restype = ctypes.c_int64
        u64 = ctypes.c_uint64
        self.os.os_faults_set.argtypes = [ctypes.c_char_p, u64, ctypes.c_int, u64]
        if self.os.os_faults_watch(b"/libmemsaver.so") != 0:
            raise RuntimeError("libmemsaver.so is not loaded")
        self.sim = Simulator()
        self.idle: dict[int, int] = {}

    def start(self, devices: int) -> None:
        """Start the driver and allocate everything that the library keeps permanently for each
        device.
        """
        for device in range(devices):
            self.sim.start(device)
            # This also creates the copy streams and loads the kernel.
            first = Group(self, [f"first-{device}"], "host")
            first.allocate([4096], device)
            with self.memsaver.paused(*first.names):
                pass
        self.memsaver.trim(wait=True)
        self.idle = dict(self.sim.idle)

    # --- faults

    def stand(self, call: str, code: int) -> None:
        """Make the operating system reject this call permanently."""
        assert self.os.os_faults_stand(call.encode(), code) == 0, call

    def counts(self) -> dict[str, int]:
        """Return the number of calls so far, by name."""
        made = {name: self.sim.calls(name) for name in DRIVER_CALLS}
        made.update({name: self.os.os_faults_calls(name.encode()) for name in OS_CALLS})
        return made

    def arm(self, injection: Injection) -> None:
        times = 0 if injection.forever else 1
        if injection.of_driver:
            self._last = self.sim.calls(injection.call) + injection.nth
            self.sim.fail(injection.call, injection.code, injection.nth, times)
        else:
            name = injection.call.encode()
            assert self.os.os_faults_set(name, injection.nth, injection.code, times) == 0

    def disarm(self, injection: Injection) -> bool:
        """Remove the fault; return whether it made a call fail."""
        if injection.of_driver:
            met: bool = self.sim.calls(injection.call) >= self._last
            self.sim.clear_faults()
            return met
        return bool(self.os.os_faults_clear())

    # --- figures

    def totals(self) -> dict[str, Any]:
        """Return all counters of the driver and system that a leak would change, by name."""
        totals = self.sim.counts()
        end = time.monotonic() + 1  # for work that no call waits for
        while totals.queued_operations and time.monotonic() < end:
            time.sleep(0.0005)
            totals = self.sim.counts()
        figures: dict[str, Any] = {name: getattr(totals, name) for name in totals._names}
        for device in self.idle:
            figures[f"physical_bytes[{device}]"] = totals.physical_bytes[device]
        figures["files"] = len(os.listdir("/proc/self/fd"))
        figures["mapped_bytes"] = self.os.os_faults_mapped_bytes()
        stats = self.memsaver.stats()
        figures["resident_bytes"] = stats.resident_bytes
        figures["host_bytes"] = stats.host_bytes
        figures["disk_bytes"] = stats.disk_bytes
        figures["peer_bytes"] = stats.peer_bytes
        return figures

    def tags_bytes(self) -> int:
        """Return the device memory that the driver counts, without backups and the library's own
        memory.
        """
        physical = self.sim.counts().physical_bytes
        used = sum(physical[device] - idle for device, idle in self.idle.items())
        # The backups of one of the two devices are on the other one.
        rows = self.memsaver.stats().tags
        return used - sum(row.peer_bytes for row in rows if 1 - row.device in self.idle)


class Group:
    """Tags that change together, with their blocks and the blocks' contents."""

    def __init__(
        self, machine: Machine, names: list[str], backup: str | None, shareable: bool = False
    ) -> None:
        self.machine, self.names, self.backup = machine, names, backup
        self.shareable = shareable
        self.blocks: list[tuple[Any, bytes]] = []
        self._seed = 0

    def allocate(self, sizes: list[int], device: int = 0, tag: int = 0) -> None:
        memsaver = self.machine.memsaver
        with memsaver.region(self.names[tag], backup=self.backup, shareable=self.shareable):
            for nbytes in sizes:
                self._seed += 1
                contents = random.Random(f"{self.names[tag]} {self._seed}").randbytes(nbytes)
                self.blocks.append((memsaver.simulator.buffer(nbytes, device), contents))

    def fill(self) -> None:
        for block, contents in self.blocks:
            self.machine.sim.write(block.address, contents)

    def change(self) -> None:
        """Write different contents to a part of each block."""
        for i, (block, contents) in enumerate(self.blocks):
            self._seed += 1
            fresh = random.Random(self._seed).randbytes(min(block.nbytes, 512))
            self.blocks[i] = (block, fresh + contents[len(fresh) :])
            self.machine.sim.write(block.address, fresh)

    def states(self) -> set[str]:
        return {str(self.machine.memsaver.state(name)) for name in self.names}

    def held(self) -> int:
        """Return the device memory that the library reports for the tags."""
        rows = self.machine.memsaver.stats().tags
        return sum(row.resident_bytes for row in rows if row.tag in self.names)

    def is_intact(self) -> bool:
        read = self.machine.sim.read
        return all(read(block.address, block.nbytes) == data for block, data in self.blocks)

    def is_zero(self) -> bool:
        read = self.machine.sim.read
        return all(
            read(block.address, block.nbytes) == bytes(block.nbytes) for block, _ in self.blocks
        )

    def is_gone(self) -> bool:
        return not any(self.machine.sim.accessible(block.address) for block, _ in self.blocks)

    def came_back(self) -> bool:
        """Return whether a resume restored the contents; without a backup, the contents must be
        zeros.
        """
        return self.is_zero() if self.backup in (None, "none") else self.is_intact()
