"""The processes that use a device's memory, as reported by NVML."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from memsaver._runtime.native import _C
from memsaver._runtime.text import size_text

__all__ = ["DeviceProcess", "device_processes"]


@dataclass(frozen=True)
class DeviceProcess:
    """A process that has memory on the device, as reported by NVML.

    Attributes:
        pid: its process id; in a container this may be the host's id.
        name: the program's name, or "" if NVML does not report it.
        bytes: device memory in use; None if NVML does not report it.
    """

    pid: int
    name: str
    bytes: int | None

    def __str__(self) -> str:
        """Return a text such as "4711 python3 (1.25 GiB)"."""
        size = "" if self.bytes is None else f"({size_text(self.bytes)})"
        return " ".join(filter(None, (str(self.pid), self.name, size)))


def device_processes(device: int) -> tuple[DeviceProcess, ...]:
    """Return the processes on a device, largest first; empty if NVML is unavailable."""
    try:
        import pynvml

        bus_id = _C.device_bus_id(device)
        pynvml.nvmlInit()
    except Exception:
        return ()
    try:
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(bus_id)
        found = [
            DeviceProcess(int(row.pid), _name(pynvml, row.pid), row.usedGpuMemory)
            for row in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        ]
    except Exception:
        return ()
    finally:
        try:
            pynvml.nvmlShutdown()
        except Exception:
            pass
    return tuple(sorted(found, key=lambda process: -(process.bytes or 0)))


def _name(pynvml: Any, pid: int) -> str:
    try:
        name = pynvml.nvmlSystemGetProcessName(pid)
    except Exception:
        return ""
    text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    return os.path.basename(text.split(" ")[0])
