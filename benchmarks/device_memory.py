"""Measure a GPU's memory use with NVML, and the peak memory use of each stage."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator

LIBRARY = "libnvidia-ml.so.1"
INTERVAL = 0.01  # seconds between two readings; a bucket of weights exists for longer


def first_gpu() -> str:
    """Return the first visible GPU: its entry in CUDA_VISIBLE_DEVICES, or else "0"."""
    return visible_gpu(0)


def visible_gpu(place: int) -> str:
    """Return the visible GPU at an index: its entry in CUDA_VISIBLE_DEVICES, or else the index."""
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return names[place] if any(names) else str(place)


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class DeviceMemory:
    """The memory that all processes use on the first visible GPU. Creates no CUDA context.

    Raises:
        RuntimeError: NVML is missing or does not report the memory in use.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise RuntimeError(f"NVML, which reports the memory in use: {error}") from None
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
        """Return the bytes in use, including the driver's own memory. Callable from any thread."""
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
    """The peak memory use of each stage, sampled by a thread during the stage.

    Args:
        used: a function that returns the bytes in use. This thread and the sampling thread call the
            function, possibly at the same time.
        interval: the seconds between two readings.
    """

    def __init__(self, used: Callable[[], int], interval: float = INTERVAL) -> None:
        self._used = used
        self._interval = interval
        self._highest = 0
        self.stages: dict[str, int] = {}  # bytes, for stages that have ended

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure the block as one stage. Stages must not be nested."""
        self._highest = self._used()
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,), name="peaks", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            last = self._used()
            thread.join()
            self.stages[name] = max(self._highest, last)

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(self._interval):
            self._highest = max(self._highest, self._used())
