"""How much of the GPU's memory is in use, by NVML, and the most of it between two moments."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator

LIBRARY = "libnvidia-ml.so.1"
INTERVAL = 0.01  # seconds between two readings: a bucket of weights is there for longer


def first_gpu() -> str:
    """The first GPU that is visible: its number, or what CUDA_VISIBLE_DEVICES calls it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip() or "0"


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class DeviceMemory:
    """The memory of the first visible GPU, in use by whichever process. Starts no CUDA context.

    Raises:
        RuntimeError: NVML is not there, or does not say.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise RuntimeError(f"NVML, which says how much memory is in use: {error}") from None
        self._call("nvmlInit_v2")
        self._device = ctypes.c_void_p()
        gpu = first_gpu()
        if gpu.isdecimal():
            get, key = "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(int(gpu))
        else:
            get, key = "nvmlDeviceGetHandleByUUID", ctypes.c_char_p(gpu.encode())
        self._call(get, key, ctypes.byref(self._device))
        self.total = self._read().total

    def used(self) -> int:
        """Bytes in use, what the driver keeps for itself included. Any thread."""
        found = self._read()
        return int(found.total - found.free)

    def _read(self) -> _Memory:
        found = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", self._device, ctypes.byref(found))
        return found

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} of NVML failed with status {status}")


class Peaks:
    """The most that was in use in each stage, by readings of a thread of its own.

    Args:
        used: bytes in use now; called from that thread too.
        interval: seconds between two readings.
    """

    def __init__(self, used: Callable[[], int], interval: float = INTERVAL) -> None:
        self._used = used
        self._interval = interval
        self._lock = threading.Lock()
        self._highest = 0
        self.stages: dict[str, int] = {}  # bytes; of stages that ended
        threading.Thread(target=self._watch, name="peaks", daemon=True).start()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What lies inside is this stage. Stages follow each other; one within another is wrong."""
        now = self._used()
        with self._lock:
            self._highest = now
        try:
            yield
        finally:
            self._see(self._used())
            with self._lock:
                self.stages[name] = self._highest

    def _watch(self) -> None:
        wait = threading.Event()
        while not wait.wait(self._interval):
            self._see(self._used())

    def _see(self, now: int) -> None:
        with self._lock:
            self._highest = max(self._highest, now)
