"""The library's own kernel, with memory to read and host memory for launches."""

from __future__ import annotations

import ctypes

from driver_api import Driver
from driver_values import PAGE
from fingerprint_reference import digest

PIECES = [(0, 65536), (16, 4096), (65536, 1), (70003, 1000), (0, 0)]  # offset, bytes
DATA = bytes(range(251)) * 300


class Kernel:
    """The loaded kernel, device memory with contents, and the host memory for launches."""

    def __init__(self, drv: Driver, flags: int = 0):
        self.drv, self.module = drv, drv.module()
        self.kernel = drv.kernel(self.module)
        self.memory = ctypes.create_string_buffer(2 * PAGE)
        self.host = (ctypes.addressof(self.memory) + 4095) // 4096 * 4096
        drv.check("cuMemHostRegister", self.host, 8192, flags)
        self.pieces = drv.get("cuMemHostGetDevicePointer", ctypes.c_uint64, self.host, 0)
        self.address, self.handle = drv.mapped(PAGE)
        drv.write(self.address, DATA)
        flat = [n for at, size in PIECES for n in (self.address + at, size)]
        (ctypes.c_uint64 * len(flat)).from_address(self.host)[:] = flat

    def launch(self, stream) -> int:
        return self.drv.launch(self.kernel, self.pieces, self.pieces + 4096, len(PIECES), stream)

    def found(self) -> list[bytes]:
        text = ctypes.string_at(self.host + 4096, 32 * len(PIECES))
        return [text[at : at + 32] for at in range(0, len(text), 32)]

    def expected(self, data: bytes = DATA) -> list[bytes]:
        return [digest(data[at : at + size]) for at, size in PIECES]

    def close(self) -> None:
        self.drv.discard(self.address, PAGE, self.handle)
        self.drv.check("cuMemHostUnregister", self.host)
        self.drv.check("cuModuleUnload", self.module)
