"""The process's simulated devices, with safe access to their memory and with their counters."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import time
from typing import Any

from simulated_driver import Simulator

import memsaver
from memsaver._runtime.native import _C

MIB = 1 << 20
DEVICES = 2
NAMES = ("a", "b", "c", "d", "e")  # all tags of the process
_POOL = 4 * MIB + 4093  # random bytes; not a multiple of any block size

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class Place:
    """The devices of a process. Only the main thread can use this object.

    Device memory is accessed through system calls or after a system call has accessed the same
    page. An unmapped address therefore causes an error instead of a crash.
    """

    def __init__(self) -> None:
        self.sim = Simulator()
        self._streams = contextlib.ExitStack()
        self.streams = [
            self._streams.enter_context(self.sim.stream(device)) for device in range(DEVICES)
        ]
        self._random = memoryview(random.Random(1).randbytes(_POOL))
        self._pool = os.memfd_create("pool")
        os.write(self._pool, self._random)
        self._window = os.memfd_create("window")
        # Make the library create its permanent objects (streams, the kernel, addresses).
        for device in range(DEVICES):
            self.sim.start(device)
            for name in NAMES:
                for backup in ("host", "pageable"):
                    with memsaver.region(name, backup=backup):
                        block = _C.malloc(4096, device)
                    for _ in range(2):
                        with memsaver.paused(name):
                            pass
                    _C.free(block)
        memsaver.trim(wait=True)
        physical = self.sim.counts().physical_bytes
        self.idle = [physical[device] for device in range(DEVICES)]
        self._occupied = [0] * DEVICES

    # --- memory

    def fill(self, address: int, contents: bytearray, start: int, length: int, seed: int) -> None:
        """Write random bytes to memory at `address` and to `contents`, at offset `start`."""
        end, at = start + length, seed * 7919 % _POOL
        while start < end:
            size = min(end - start, _POOL - at)
            target = (ctypes.c_char * size).from_address(address + start)
            done = os.preadv(self._pool, [target], at)
            if done != size:
                raise AssertionError(f"no memory at {address + start + done:#x}")
            contents[start : start + size] = self._random[at : at + size]
            start, at = start + size, 0

    def some_bytes(self, length: int, seed: int) -> bytes:
        at = seed * 7919 % (_POOL - length)
        return bytes(self._random[at : at + length])

    def difference(self, address: int, contents: bytearray, start: int, end: int) -> str | None:
        """Return a description of the first byte at an address that differs, or None."""
        expected = ctypes.addressof((ctypes.c_char * len(contents)).from_buffer(contents))
        while start < end:
            at = address + start
            size = min(end - start, MIB - at % MIB)  # within a page of device memory
            if not self.accessible(at):
                return f"no memory at {at:#x}"
            if _libc.memcmp(at, expected + start, size) != 0:
                found = ctypes.string_at(at, size)
                wrong = next(i for i in range(size) if found[i] != contents[start + i])
                return (
                    f"the byte at {at + wrong:#x} (offset {start + wrong}) is "
                    f"{found[wrong]}, not {contents[start + wrong]}"
                )
            start += size
        return None

    def accessible(self, address: int) -> bool:
        try:
            return os.pwrite(self._window, (ctypes.c_char * 1).from_address(address), 0) == 1
        except OSError:
            return False

    def synchronize(self) -> None:
        """Wait for the program's own work on the devices."""
        for stream in self.streams:
            self.sim.opened.cuStreamSynchronize(stream)

    # --- amounts of memory

    def leave(self, device: int, nbytes: int | None) -> None:
        """Make another process allocate all but `nbytes` bytes of a device; None releases this
        memory.
        """
        self._occupied[device] = 0
        self.sim.occupy(0, device)
        if nbytes is not None:
            free, _ = memsaver.device_memory(device)
            self._occupied[device] = max(0, free - nbytes)
            self.sim.occupy(self._occupied[device], device)

    def scarce(self, device: int) -> bool:
        return self._occupied[device] > 0

    def held(self, physical: Any, device: int) -> int:
        """Return the device memory in use, without the library's own."""
        return int(physical[device] - self.idle[device])

    def figures(self) -> dict[str, int]:
        """Return all counters that a leak would change, keyed by name. The caller must ensure that
        no operation is in progress.
        """
        totals = self.sim.counts()
        end = time.monotonic() + 1  # for work that no call had to wait for
        while totals.queued_operations and time.monotonic() < end:
            time.sleep(0.0005)
            totals = self.sim.counts()
        figures = {name: int(getattr(totals, name)) for name in totals._names}
        for device in range(DEVICES):
            figures[f"physical_bytes[{device}]"] = totals.physical_bytes[device]
        figures["files"] = len(os.listdir("/proc/self/fd"))
        stats = memsaver.stats()
        figures["host_bytes"] = stats.host_bytes
        figures["disk_bytes"] = stats.disk_bytes
        figures["peer_bytes"] = stats.peer_bytes
        return figures
