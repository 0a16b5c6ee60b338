"""The simulated driver with its controls and its state, and memory with known contents."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
from collections.abc import Iterator

# Known contents repeat after this many bytes. The number is odd, so that no two pages within 4 GiB
# are equal.
PERIOD = (1 << 20) - 3


@functools.lru_cache(maxsize=32)
def _period(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def known_parts(seed: int, nbytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield parts of `known_bytes` with their offsets, without copying all bytes."""
    period = _period(seed, min(nbytes, PERIOD))
    for at in range(0, nbytes, PERIOD):
        yield at, period[: nbytes - at]


def known_bytes(seed: int, nbytes: int) -> bytes:
    """Return `nbytes` bytes that depend only on the seed."""
    return b"".join(part for _, part in known_parts(seed, nbytes))


# Bytes to be filled before anything else sees them, which saves zeroing them and a copy of them.
_NEW_BYTES = ctypes.pythonapi.PyBytes_FromStringAndSize
_NEW_BYTES.restype, _NEW_BYTES.argtypes = ctypes.py_object, [ctypes.c_char_p, ctypes.c_ssize_t]


class Totals(ctypes.Structure):
    """The struct sim_totals of csrc/sim/sim.h."""

    _order = (
        "handles mappings reservations reserved_bytes allocations pinned_bytes registered_bytes "
        "streams events graphs modules captures retained_contexts queued_operations violations "
        "illegal_accesses devices"
    )
    _names = tuple(_order.split())
    _fields_ = [(name, ctypes.c_uint64) for name in _names] + [
        ("physical_bytes", ctypes.c_uint64 * 16)
    ]


class Simulator:
    """The simulated driver with its controls, its state, and safe access to its memory."""

    OUT_OF_MEMORY = 2
    INVALID_VALUE = 1
    LAUNCH_FAILED = 719

    def __init__(self) -> None:
        from memsaver._runtime.native import LIBRARY_DIR

        self.opened = ctypes.CDLL(str(LIBRARY_DIR / "libmemsaver_sim.so"))
        u64, text, pointer = ctypes.c_uint64, ctypes.c_char_p, ctypes.c_void_p
        for name, result, arguments in (
            ("sim_fail", ctypes.c_int, [text, u64, ctypes.c_int, u64]),
            ("sim_calls", u64, [text]),
            ("sim_counts", ctypes.c_int, [ctypes.POINTER(Totals)]),
            ("sim_violation", ctypes.c_int, [u64, text, ctypes.c_size_t]),
            ("sim_occupy", ctypes.c_int, [ctypes.c_int, u64]),
            ("sim_host_limit", None, [u64]),
            ("sim_granularity", ctypes.c_int, [u64]),
            ("sim_peer_access", None, [ctypes.c_int]),
            ("sim_stream_delay", None, [u64]),
            ("sim_copy_rate", None, [u64]),
            ("sim_hold_memory", None, [u64, u64]),
            ("sim_read", ctypes.c_int, [u64, pointer, u64]),
            ("sim_write", ctypes.c_int, [u64, text, u64]),
        ):
            function = getattr(self.opened, name)
            function.restype, function.argtypes = result, arguments
        self.opened.cuMemsetD8Async.argtypes = [u64, ctypes.c_ubyte, ctypes.c_size_t, pointer]
        self.opened.cuMemcpyHtoDAsync_v2.argtypes = [u64, u64, ctypes.c_size_t, pointer]
        self.opened.cuMemcpyDtoHAsync_v2.argtypes = [u64, u64, ctypes.c_size_t, pointer]
        self.opened.cuStreamSynchronize.argtypes = [pointer]
        self.opened.cuStreamDestroy_v2.argtypes = [pointer]
        self.opened.cuCtxPushCurrent_v2.argtypes = [pointer]
        self.opened.cuStreamBeginCapture_v2.argtypes = [pointer, ctypes.c_int]
        self.opened.cuStreamEndCapture.argtypes = [pointer, pointer]
        self.opened.cuGraphDestroy.argtypes = [pointer]
        self.idle: dict[int, int] = {}

    # Its behaviour.

    def fail(self, call: str, code: int, nth: int = 1, times: int = 1) -> None:
        """Make the nth subsequent call to a function fail; `times` calls fail in total (0: all)."""
        assert self.opened.sim_fail(call.encode(), nth, code, times) == 0, f"no call {call}"

    def clear_faults(self) -> None:
        self.opened.sim_clear_faults()

    @contextlib.contextmanager
    def fault(self, call: str, code: int = 1, nth: int = 1, times: int = 1):
        self.fail(call, code, nth, times)
        try:
            yield
        finally:
            self.clear_faults()

    def calls(self, call: str) -> int:
        return self.opened.sim_calls(call.encode())

    def occupy(self, nbytes: int, device: int = 0) -> None:
        """Allocate memory as another process."""
        assert self.opened.sim_occupy(device, nbytes) == 0

    def granularity(self, nbytes: int) -> None:
        """Set the granularity of device memory before the driver starts."""
        assert self.opened.sim_granularity(nbytes) == 0, f"{nbytes} bytes, or it has started"

    def peer_access(self, possible: bool) -> None:
        """Allow all devices to access each other's memory, or forbid all such accesses."""
        self.opened.sim_peer_access(int(possible))

    def host_limit(self, nbytes: int = (1 << 64) - 1) -> None:
        self.opened.sim_host_limit(nbytes)

    def stream_delay(self, seconds: float) -> None:
        """Delay the start of every copy and memset by this duration."""
        self.opened.sim_stream_delay(int(seconds * 1e6))

    def copy_rate(self, bytes_per_second: int) -> None:
        self.opened.sim_copy_rate(bytes_per_second)

    def hold_streams(self, held: bool) -> None:
        """Prevent all streams from starting operations, or let them continue."""
        self.opened.sim_hold_streams(int(held))

    def hold_memory(self, address: int, nbytes: int) -> None:
        """Block operations on this memory and later operations on their streams; 0 bytes unblocks
        them.
        """
        self.opened.sim_hold_memory(address, nbytes)

    def deinitialize(self, gone: bool) -> None:
        self.opened.sim_deinitialize(int(gone))

    def reset(self) -> None:
        self.clear_faults()
        self.hold_streams(False)
        self.hold_memory(0, 0)
        self.stream_delay(0)
        self.copy_rate(0)
        self.host_limit()
        self.peer_access(True)
        self.deinitialize(False)
        if self.counts().devices:
            self.occupy(0)

    # Its state.

    def counts(self) -> Totals:
        totals = Totals()
        self.opened.sim_counts(ctypes.byref(totals))
        return totals

    def physical(self, device: int = 0) -> int:
        """Return the device memory in use, as the driver counts it."""
        return self.counts().physical_bytes[device]

    def tag_bytes(self, device: int = 0) -> int:
        """Return the device memory except the library's own. Without leaks, this is the tags'
        memory.
        """
        return self.physical(device) - self.idle[device]

    def start(self, device: int = 0) -> int:
        """Start a device in a child process, to measure the library's own memory on the device."""
        import memsaver

        memsaver.device_memory(device)
        self.idle[device] = self.physical(device)
        return self.idle[device]

    def violations(self) -> list[str]:
        """Return violations: memory unmapped during pending work or accessed while unmapped."""
        found, buffer = [], ctypes.create_string_buffer(500)
        while self.opened.sim_violation(len(found), buffer, 500) >= 0:
            found.append(buffer.value.decode())
        return found

    def clear_violations(self) -> None:
        self.opened.sim_clear_violations()

    # Device memory, through the simulator: an address without memory is an error, not a crash. Any
    # number of threads may read at once, even if the process has no free descriptor.

    def read(self, address: int, nbytes: int) -> bytes:
        """Return the bytes at an address. Raises AssertionError if the memory is not accessible."""
        contents: bytes = _NEW_BYTES(None, nbytes)
        assert self.opened.sim_read(address, contents, nbytes) == 0, _no_memory(address, nbytes)
        return contents

    def write(self, address: int, data: bytes) -> None:
        """Write bytes at an address. Raises AssertionError if the memory is not accessible."""
        done = self.opened.sim_write(address, data, len(data))
        assert done == 0, _no_memory(address, len(data))

    def contains(self, address: int, data: bytes) -> bool:
        """Return whether memory at an address contains these bytes, without copying all of them."""
        parts = ((at, data[at : at + PERIOD]) for at in range(0, len(data), PERIOD))
        return all(self.read(address + at, len(part)) == part for at, part in parts)

    def accessible(self, address: int, nbytes: int = 1) -> bool:
        try:
            self.read(address, nbytes)
        except AssertionError:
            return False
        return True

    # The program's own work.

    @contextlib.contextmanager
    def stream(self, device: int = 0):
        """Create a stream for the program; the stream's context is current on this thread."""
        library, context, stream = self.opened, ctypes.c_void_p(), ctypes.c_void_p()
        assert library.cuInit(0) == 0
        assert library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        assert library.cuCtxPushCurrent_v2(context) == 0
        assert library.cuStreamCreate(ctypes.byref(stream), 1) == 0
        try:
            yield stream
        finally:
            library.cuStreamSynchronize(stream)
            library.cuStreamDestroy_v2(stream)
            library.cuCtxPopCurrent_v2(ctypes.byref(context))
            library.cuDevicePrimaryCtxRelease_v2(device)

    def memset(self, address: int, value: int, nbytes: int, stream) -> None:
        """Queue a fill on a stream."""
        assert self.opened.cuMemsetD8Async(address, value, nbytes, stream) == 0

    def to_device(self, address: int, host: int, nbytes: int, stream) -> int:
        """Queue a copy from host memory; return the driver's result code."""
        return self.opened.cuMemcpyHtoDAsync_v2(address, host, nbytes, stream)

    def to_host(self, host: int, address: int, nbytes: int, stream) -> int:
        """Queue a copy to host memory; return the driver's result code."""
        return self.opened.cuMemcpyDtoHAsync_v2(host, address, nbytes, stream)


class Block:
    """Simulated device memory with known random contents."""

    def __init__(self, sim: Simulator, nbytes: int, seed: int, device: int = 0) -> None:
        from memsaver import simulator

        self.sim = sim
        self.buffer = simulator.buffer(nbytes, device)
        self.address = self.buffer.address
        self.nbytes = nbytes
        self.fill(seed)

    def fill(self, seed: int) -> None:
        self.seed = seed
        for at, part in known_parts(seed, self.nbytes):
            self.sim.write(self.address + at, part)

    def expected(self) -> bytes:
        return known_bytes(self.seed, self.nbytes)

    def bytes(self) -> bytes:
        return self.sim.read(self.address, self.nbytes)

    def is_intact(self) -> bool:
        parts = known_parts(self.seed, self.nbytes)
        return all(self.sim.read(self.address + at, len(part)) == part for at, part in parts)

    def is_zero(self) -> bool:
        return self.sim.contains(self.address, bytes(self.nbytes))


def _no_memory(address: int, nbytes: int) -> str:
    return f"no accessible memory at {address:#x}, {nbytes} bytes"
