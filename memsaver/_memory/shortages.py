"""The tags and processes that use a device's memory, for out-of-memory errors.

The tags and processes are determined only when such an error is created. Details that cannot be
determined are omitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from memsaver._memory.device_processes import DeviceProcess, device_processes
from memsaver._runtime.native import _C, STATES, State
from memsaver._runtime.text import size_text
from memsaver.errors import MemsaverError, OutOfDeviceMemoryError, completions

__all__ = ["Holder", "describe"]


@dataclass(frozen=True)
class Holder:
    """A tag that has memory on the device.

    Attributes:
        tag: the tag.
        bytes: device memory in use, as counted by the driver.
        state: the tag's state.
        pausable: whether a pause of the tag would begin at once: the tag is mapped, its regions are
            closed, no transition and no callback of another thread uses the tag, and no other
            process uses its tensors.
    """

    tag: str
    bytes: int
    state: State
    pausable: bool


def _add_holders(error: MemsaverError) -> None:
    """Set `holders` and `processes` of an OutOfDeviceMemoryError, and add them to its message."""
    if not isinstance(error, OutOfDeviceMemoryError) or error.device < 0:
        return
    error.holders = _holders(error.device)
    error.processes = device_processes(error.device)
    error.message += _advice(error.holders, error.processes)


def describe(device: int) -> str:
    """Describe a device's free memory, tags and processes, for a note on a library's error."""
    holders = _holders(device)
    held = ", ".join(f"{row.tag!r} {size_text(row.bytes)}" for row in holders)
    free = ""
    try:
        free = f", {size_text(_C.device_memory(device)[0])} are free"
    except Exception:
        pass  # the driver may fail in any way after an error
    advice = _advice(holders, device_processes(device))
    return f"memsaver: on device {device}{free}; resident tags: {held or 'none'}{advice}"


def _holders(device: int) -> tuple[Holder, ...]:
    """Return the tags that have memory on a device, largest first."""
    try:
        held = []
        for row in _C.stats():
            tag, nbytes = str(row["tag"]), int(row["resident_bytes"])
            if nbytes > 0 and row["device"] == device:
                held.append(Holder(tag, nbytes, STATES[int(row["state"])], _C.tag_pausable(tag)))
        return tuple(sorted(held, key=lambda holder: -holder.bytes))
    except Exception:
        return ()  # the original error matters more


def _advice(holders: tuple[Holder, ...], processes: tuple[DeviceProcess, ...]) -> str:
    """Return the part of a message that lists the pausable tags and the other processes."""
    text = ""
    if holders:
        pausable = ", ".join(repr(row.tag) for row in holders if row.pausable)
        none = "none of them, because a region of each is open or a transition is in progress"
        text += f". These can be paused now: {pausable or none}"
    if processes:
        text += f". Other processes on the GPU: {', '.join(map(str, processes))}"
    return text


completions.append(_add_holders)
