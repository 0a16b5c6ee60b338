"""The CUDA driver (real or simulated) through ctypes, for the conformance tests and questions."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import textwrap
import threading
from ctypes import byref, c_char_p, c_int, c_size_t, c_ulonglong, c_void_p
from pathlib import Path

from driver_values import (
    FILE_DESCRIPTOR,
    NON_BLOCKING,
    OLDER,
    OUT_OF_MEMORY,
    READ_WRITE,
    SIGNATURES,
    SUCCESS,
    AccessDesc,
    AllocationProp,
    HostFunction,
    Location,
    Totals,
)

KERNEL_IMAGE = Path(__file__).parents[2] / "csrc" / "kernels" / "fingerprint.fatbin"
KERNEL_THREADS = 256


class DriverError(Exception):
    def __init__(self, call: str, code: int):
        super().__init__(f"{call} returned {code}")
        self.call, self.code = call, code


def simulator_path() -> str | None:
    named = os.environ.get("MEMSAVER_SIM_LIBRARY")
    if named:
        return named
    found = importlib.util.find_spec("memsaver")
    for folder in (found.submodule_search_locations if found else None) or ():
        path = Path(folder) / "libmemsaver_sim.so"
        if path.exists():
            return str(path)
    return None


@functools.cache
def real_driver_works() -> bool:
    """Return whether libcuda.so.1 finds a GPU. A child process makes the query."""
    code = "import ctypes, sys; sys.exit(ctypes.CDLL('libcuda.so.1').cuInit(0) != 0)"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


class Driver:
    """A driver library.

    Calls are attributes: `drv.cuMemUnmap(address, size)` returns the result code.
    """

    def __init__(self, path: str):
        self.path = path
        self.opened = ctypes.CDLL(path)
        self.simulated = hasattr(self.opened, "sim_counts")
        self.context = None
        self.device = 0
        self._kept = []

    def __getattr__(self, name: str):
        if name not in SIGNATURES:
            raise AttributeError(name)
        symbol, types = SIGNATURES[name]
        try:
            function = getattr(self.opened, symbol)
        except AttributeError:
            function = getattr(self.opened, OLDER.get(name, symbol))
        function.argtypes, function.restype = types, c_int
        setattr(self, name, function)
        return function

    def has(self, name: str) -> bool:
        return hasattr(self.opened, SIGNATURES[name][0])

    def check(self, name: str, *arguments) -> None:
        code = getattr(self, name)(*arguments)
        if code != SUCCESS:
            raise DriverError(name, code)

    def start(self, device: int = 0) -> Driver:
        """Call cuInit and make the device's primary context current on this thread."""
        self.check("cuInit", 0)
        context = c_void_p()
        self.check("cuDevicePrimaryCtxRetain", byref(context), device)
        self.device, self.context = device, context
        self.check("cuCtxSetCurrent", context)
        return self

    def get(self, name: str, kind, *arguments):
        """Return the value that a call writes through its first argument."""
        value = kind()
        self.check(name, ctypes.addressof(value), *arguments)
        return value.value

    def text(self, name: str, code: int) -> str:
        value = c_char_p()
        if getattr(self, name)(code, ctypes.addressof(value)) != SUCCESS:
            return ""
        return (value.value or b"").decode()

    # memory

    def properties(self, device: int | None = None) -> AllocationProp:
        ordinal = self.device if device is None else device
        return AllocationProp(type=1, location=Location(1, ordinal))

    def free_bytes(self) -> int:
        free, total = c_size_t(), c_size_t()
        self.check("cuMemGetInfo", byref(free), byref(total))
        return free.value

    def total_bytes(self) -> int:
        free, total = c_size_t(), c_size_t()
        self.check("cuMemGetInfo", byref(free), byref(total))
        return total.value

    def reserve(self, size: int, alignment: int = 0, hint: int = 0) -> int:
        return self.get("cuMemAddressReserve", ctypes.c_uint64, size, alignment, hint, 0)

    def create(self, size: int, device: int | None = None) -> int:
        return self.get("cuMemCreate", ctypes.c_uint64, size, byref(self.properties(device)), 0)

    def create_exportable(self, size: int) -> int:
        properties = self.properties()
        properties.handle_types = FILE_DESCRIPTOR
        return self.get("cuMemCreate", ctypes.c_uint64, size, byref(properties), 0)

    def export(self, handle: int) -> int:
        """Return a file descriptor of exportable memory."""
        return self.get("cuMemExportToShareableHandle", c_int, handle, FILE_DESCRIPTOR, 0)

    def import_from(self, file: int) -> int:
        """Return a handle for the memory behind a descriptor. The descriptor stays open."""
        return self.get("cuMemImportFromShareableHandle", ctypes.c_uint64, file, FILE_DESCRIPTOR)

    def try_create(self, size: int) -> int:
        """Return cuMemCreate's result code; release the memory if the call succeeds."""
        handle = ctypes.c_uint64()
        code = self.cuMemCreate(byref(handle), size, byref(self.properties()), 0)
        if code == SUCCESS:
            self.check("cuMemRelease", handle.value)
        return code

    def set_access(
        self, address: int, size: int, flags: int = READ_WRITE, device: int | None = None
    ) -> int:
        wanted = AccessDesc(Location(1, self.device if device is None else device), flags)
        return self.cuMemSetAccess(address, size, byref(wanted), 1)

    def get_access(self, address: int, device: int | None = None) -> int:
        location = Location(1, self.device if device is None else device)
        return self.get("cuMemGetAccess", c_ulonglong, byref(location), address)

    def map(self, address: int, size: int, handle: int, access: bool = True) -> None:
        self.check("cuMemMap", address, size, 0, handle, 0)
        if access and self.set_access(address, size) != SUCCESS:
            raise DriverError("cuMemSetAccess", -1)

    def mapped(self, size: int) -> tuple[int, int]:
        """Return a reservation with accessible memory: (address, handle)."""
        address, handle = self.reserve(size), self.create(size)
        self.map(address, size, handle)
        return address, handle

    def discard(self, address: int, size: int, *handles: int) -> None:
        self.check("cuMemUnmap", address, size)
        for handle in handles:
            self.check("cuMemRelease", handle)
        self.check("cuMemAddressFree", address, size)

    def read(self, address: int, size: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        self.check("cuMemcpyDtoH", ctypes.addressof(buffer), address, size)
        return buffer.raw

    def write(self, address: int, data: bytes) -> None:
        buffer = ctypes.create_string_buffer(data, len(data))
        self.check("cuMemcpyHtoD", address, ctypes.addressof(buffer), len(data))

    def pinned(self, size: int) -> int:
        return self.get("cuMemHostAlloc", c_void_p, size, 0)

    # streams

    def stream(self, flags: int = NON_BLOCKING) -> int:
        return self.get("cuStreamCreate", c_void_p, flags)

    def event(self, flags: int = 0) -> int:
        return self.get("cuEventCreate", c_void_p, flags)

    def host_function(self, stream: int | None, function) -> None:
        wrapped = HostFunction(lambda _: function())
        self._kept.append(wrapped)  # the driver calls it later
        self.check("cuLaunchHostFunc", stream, wrapped, None)

    def gate(self, stream: int | None) -> Gate:
        return Gate(self, stream)

    def thread_mode(self, mode: int) -> int:
        value = c_int(mode)
        self.check("cuThreadExchangeStreamCaptureMode", byref(value))
        return value.value

    def capture_status(self, stream: int) -> int:
        status = c_int()
        self.check("cuStreamIsCapturing", stream, byref(status))
        return status.value

    # memsaver's own kernel

    def module(self, image: bytes | None = None) -> int:
        """Load a module from `image`, or load the library's kernel."""
        self._kept.append(ctypes.create_string_buffer(image or KERNEL_IMAGE.read_bytes()))
        return self.get("cuModuleLoadData", c_void_p, ctypes.addressof(self._kept[-1]))

    def kernel(self, module: int) -> int:
        return self.get("cuModuleGetFunction", c_void_p, module, b"ms_fingerprint")

    def launch(self, kernel: int, pieces: int, digests: int, count: int, stream: int | None) -> int:
        """Return cuLaunchKernel's result code. `pieces` and `digests` are device addresses."""
        values = [ctypes.c_uint64(pieces), ctypes.c_uint64(digests), ctypes.c_uint32(count)]
        arguments = (c_void_p * 3)(*[ctypes.addressof(value) for value in values])
        blocks, threads = (count + 3) // 4, KERNEL_THREADS
        return self.cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, None)

    # the simulator's control

    def totals(self) -> dict:
        totals = Totals()
        self.opened.sim_counts(byref(totals))
        return totals.as_dict()

    def fail(self, call: str, nth: int = 1, code: int = OUT_OF_MEMORY, times: int = 1) -> int:
        types = [c_char_p, ctypes.c_uint64, c_int, ctypes.c_uint64]
        self.opened.sim_fail.argtypes = types
        return self.opened.sim_fail(call.encode(), nth, code, times)

    def violations(self) -> list[str]:
        self.opened.sim_violation.argtypes = [ctypes.c_uint64, c_char_p, c_size_t]
        found, buffer = [], ctypes.create_string_buffer(300)
        while self.opened.sim_violation(len(found), buffer, 300) >= 0:
            found.append(buffer.value.decode())
        return found


class Gate:
    """Blocks a stream with a host function until the gate is opened or a timeout expires."""

    def __init__(self, drv: Driver, stream: int | None):
        self._open, self.entered = threading.Event(), threading.Event()

        def hold() -> None:
            self.entered.set()
            self._open.wait(8)

        drv.host_function(stream, hold)

    def open(self) -> None:
        self._open.set()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_) -> None:
        self.open()


def in_thread(drv: Driver, function, timeout: float = 10, with_context: bool = True):
    """Run a function on a new thread and return its result; raise TimeoutError after a time
    limit.
    """
    result = []

    def body() -> None:
        if with_context:
            drv.cuCtxSetCurrent(drv.context)
        try:
            result.append((function(), None))
        except BaseException as error:  # raised in the caller
            result.append((None, error))

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(timeout)
    if not result:
        raise TimeoutError
    value, error = result[0]
    if error is not None:
        raise error
    return value


def in_child(path: str, function, timeout: float = 30, environment: dict | None = None):
    """Run function(Driver(path)) in a new process; return its result, or the reason for a missing
    result.

    The result is transferred as JSON. The possible reasons are 'signal N', 'exit N: ...' and
    'timeout'.
    """
    body = textwrap.dedent(inspect.getsource(function))
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import ctypes, json, os, time\nfrom ctypes import *\nfrom driver_api import *\n"
        "from driver_values import *\n"
        f"{body}\n"
        f"value = {function.__name__}(Driver({path!r}))\n"
        "print('result ' + json.dumps(value), flush=True)\nos._exit(0)\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, **(environment or {})},
        )
    except subprocess.TimeoutExpired:
        return "timeout"
    for line in done.stdout.splitlines():
        if line.startswith("result "):
            return json.loads(line[len("result ") :])
    if done.returncode < 0:
        return f"signal {-done.returncode}"
    return f"exit {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}"
