"""The processes that use a device's memory, as reported by NVML."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memsaver._runtime.native import _C
from memsaver._runtime.text import size_text

__all__ = ["DeviceProcess", "device_processes", "own_bytes"]


@dataclass(frozen=True)
class DeviceProcess:
    """A process that uses memory on the device, as reported by NVML.

    Attributes:
        pid: its process id; in a container, possibly its process id on the host.
        name: the program's name, or "" if NVML does not report it.
        bytes: device memory in use; None if NVML does not report it.
    """

    pid: int
    name: str
    bytes: int | None

    def __str__(self) -> str:
        """Return text such as "4711 python3 (1.25 GiB)"."""
        size = "" if self.bytes is None else f"({size_text(self.bytes)})"
        return " ".join(filter(None, (str(self.pid), self.name, size)))


def device_processes(device: int) -> tuple[DeviceProcess, ...]:
    """Return the other processes on a device, largest first, or nothing if NVML is unavailable."""
    with _nvml_rows(device) as (pynvml, rows):
        found = [
            DeviceProcess(int(row.pid), _name(pynvml, row.pid), row.usedGpuMemory)
            for row in rows
            if row.pid != os.getpid()
        ]
    return tuple(sorted(found, key=lambda process: -(process.bytes or 0)))


def own_bytes(device: int) -> int | None:
    """Return the bytes that NVML reports for this process, or None if NVML does not report them."""
    with _nvml_rows(device) as (_, rows):
        return next((row.usedGpuMemory for row in rows if row.pid == os.getpid()), None)


@contextlib.contextmanager
def _nvml_rows(device: int) -> Iterator[tuple[Any, list[Any]]]:
    """Yield pynvml and its rows of a device's processes, or no rows if NVML is unavailable."""
    nvml: Any = None
    rows: list[Any] = []
    is_open = False
    try:
        import pynvml

        bus_id = _C.device_bus_id(device)
        nvml = pynvml
        nvml.nvmlInit()
        is_open = True
        handle = nvml.nvmlDeviceGetHandleByPciBusId(bus_id)
        rows = list(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except Exception:
        pass
    try:
        yield nvml, rows
    finally:
        if is_open:
            with contextlib.suppress(Exception):
                nvml.nvmlShutdown()


def _name(pynvml: Any, pid: int) -> str:
    try:
        name = pynvml.nvmlSystemGetProcessName(pid)
    except Exception:
        return ""
    text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    return os.path.basename(text.split(" ")[0])
