"""Who holds a device's memory: what an out-of-memory error says beside its figures.

Looked up when such an error is made, and only then; what cannot be found out is left out.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memsaver.native import _C, STATES, State
from memsaver.text import size_text

if TYPE_CHECKING:
    from memsaver.errors import OutOfDeviceMemoryError

__all__ = ["DeviceProcess", "Holder", "add_holders", "describe"]


@dataclass(frozen=True)
class Holder:
    """A tag that holds memory of the device.

    Attributes:
        tag: the tag.
        bytes: device memory held, as the driver counts it.
        state: the tag's state.
        pausable: whether a pause of it would begin at once: it is mapped, no thread is in a region
            of it, and no transition of it is under way.
    """

    tag: str
    bytes: int
    state: State
    pausable: bool


@dataclass(frozen=True)
class DeviceProcess:
    """A process that holds memory of the device, as NVML says.

    Attributes:
        pid: its number; in a container that may be the host's number.
        name: the program's name, "" where NVML does not say.
        bytes: device memory held; None where NVML does not say.
    """

    pid: int
    name: str
    bytes: int | None

    def __str__(self) -> str:
        """Such as "4711 python3 (1.25 GiB)"."""
        size = "" if self.bytes is None else f"({size_text(self.bytes)})"
        return " ".join(filter(None, (str(self.pid), self.name, size)))


def add_holders(error: OutOfDeviceMemoryError) -> None:
    """Fill `holders` and `processes` of a new error, and say in its message what they say."""
    if error.device < 0:
        return
    error.holders = _holders(error.device)
    error.processes = _processes(error.device)
    error.message += _advice(error.holders, error.processes)


def describe(device: int) -> str:
    """The same of a device, for an error that is not ours."""
    holders = _holders(device)
    held = ", ".join(f"{row.tag!r} {size_text(row.bytes)}" for row in holders)
    free = ""
    try:
        free = f", {size_text(_C.device_memory(device)[0])} are free"
    except Exception:
        pass  # the driver may refuse anything by now
    advice = _advice(holders, _processes(device))
    return f"memsaver: on device {device}{free}; resident tags: {held or 'none'}{advice}"


def _holders(device: int) -> tuple[Holder, ...]:
    """The tags that hold memory of a device, those with most first."""
    try:
        held = []
        for row in _C.stats():
            tag, nbytes = str(row["tag"]), int(row["resident_bytes"])
            if nbytes > 0 and row["device"] == device:
                held.append(Holder(tag, nbytes, STATES[int(row["state"])], _C.tag_pausable(tag)))
        return tuple(sorted(held, key=lambda holder: -holder.bytes))
    except Exception:
        return ()  # the error itself is worth more


def _processes(device: int) -> tuple[DeviceProcess, ...]:
    """The other processes on a device, those with most first; none where NVML cannot be asked."""
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
            if row.pid != os.getpid()
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


def _advice(holders: tuple[Holder, ...], processes: tuple[DeviceProcess, ...]) -> str:
    """What goes after a message that has named the tags with their bytes."""
    text = ""
    if holders:
        pausable = ", ".join(repr(row.tag) for row in holders if row.pausable)
        none = "none of them, for a region of each is open, or a transition is under way"
        text += f". To be paused now: {pausable or none}"
    if processes:
        text += f". Other processes on the GPU: {', '.join(map(str, processes))}"
    return text
