"""All measurements of one device, with sizes that fit the free memory of device and host."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import memsaver
from memsaver._runtime.native import _C
from memsaver._runtime.text import size_text
from memsaver.cli.bare_driver import GRANULARITY, BareDriver, BareMemory
from memsaver.cli.measurements.bus import BUFFER, buffer_bytes, measure_bus
from memsaver.cli.measurements.cycles import (
    GRAIN,
    CycledTag,
    measure_backed_up,
    measure_discarded,
)
from memsaver.cli.measurements.driver_calls import measure_driver
from memsaver.cli.measurements.figures import Figure, Limits
from memsaver.errors import ConfigError, OutOfDeviceMemoryError

__all__ = ["Measured", "measure_machine"]

MOST = 16 << 30  # default bytes: the weights of a model of 8 billion parameters
SIMULATED = 256 << 20  # the default on the simulated driver, which copies with the CPU
REST = 0.5  # seconds for the driver to clear released memory

_FREE_PART = 0.8  # the largest part of the device's free memory to use by default
_HOST_PART = 0.5  # the largest part of the host's memory to use: other processes need memory too


@dataclass
class Measured:
    """The measurements of a device.

    Attributes:
        device: the device's index.
        name: the device's name.
        driver: the CUDA version that the driver supports, such as 13000 for CUDA 13.0.
        simulated: whether the driver is simulated, in which case the times are meaningless.
        size: the bytes of the memory that was mapped, unmapped, paused and resumed.
        saved: the bytes that were backed up; 0 if no backup was measured.
        rounds: the number of repetitions. The first pause is measured only once.
        figures: the figures in display order.
        notes: remarks for the interpretation of the figures.
    """

    device: int
    name: str
    driver: int
    simulated: bool
    size: int
    saved: int
    rounds: int
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def measure_machine(
    size: int | None,
    rounds: int,
    device: int = 0,
    telling: Callable[[str], None] = lambda step: None,
) -> Measured:
    """Measure the bus, the driver's calls, and memsaver's pauses and resumes.

    Creates the device's context. For a few seconds, the function allocates `size` bytes of device
    memory, and pinned host memory for the copies and for the backup. Releases all of it.

    Args:
        size: the bytes of memory for the measurements, rounded down to 32 MiB. If None, the size is
            at most 16 GiB and at most four fifths of the free memory. The backup is smaller if the
            host has less memory.
        rounds: the number of repetitions.
        device: the device's index.
        telling: a function that receives a description of each step before the step starts.

    Raises:
        ConfigError: the device does not exist, or the size is too small.
        OutOfDeviceMemoryError: the device has too little free memory.
        NotLoadedError: there is no usable driver.
        DriverError: a driver call failed.
        MemsaverError: contents were wrong after a resume.
    """
    driver = BareDriver()
    count = driver.device_count()
    if not 0 <= device < count:
        raise ConfigError(f"there is no device {device}: the driver finds {count}")
    with driver.context(device):
        telling("looking at free memory")
        chosen = _size(size, device, driver.simulated)
        saved, notes = _saved(chosen)
        name = driver.device_name(device)
        measured = Measured(
            device, name, driver.version, driver.simulated, chosen, saved, rounds, notes=notes
        )

        def rest() -> None:
            if not driver.simulated:
                time.sleep(REST)

        telling("measuring the driver")
        memory = BareMemory(driver, chosen, device)
        try:
            calls = measure_driver(driver, memory, rounds, rest)
            telling("measuring the bus")
            memory.resume()
            bus = measure_bus(driver, memory, saved or min(chosen, BUFFER), rounds)
        finally:
            memory.close()
        measured.figures = [*bus, *calls]
        limits = Limits(measured.figures)
        telling("measuring pauses and resumes without a backup")
        tag = CycledTag(driver, device, chosen, "none", notes)
        try:
            measured.figures += measure_discarded(tag, limits, rounds, rest)
        finally:
            tag.close()
        if saved:
            telling("measuring pauses and resumes with a backup")
            tag = CycledTag(driver, device, saved, "host", notes)
            try:
                measured.figures += measure_backed_up(tag, limits, rounds)
            finally:
                tag.close()
    measured.notes = list(dict.fromkeys(notes))
    return measured


def _size(asked: int | None, device: int, simulated: bool) -> int:
    free = memsaver.device_memory(device)[0]
    most = min(MOST, SIMULATED if simulated else MOST, int(free * _FREE_PART))
    size = (most if asked is None else asked) // GRAIN * GRAIN
    if size == 0 and asked is not None:
        raise ConfigError(
            f"a size of {size_text(asked)} is too small: use at least {size_text(GRAIN)}"
        )
    if size == 0 or size + GRANULARITY > free:
        error = OutOfDeviceMemoryError(
            f"device {device} has {size_text(free)} free, and the benchmark needs "
            f"{size_text(max(size, GRAIN))}: end programs on the GPU, or choose a smaller size"
        )
        error.needed, error.free = max(size, GRAIN), free
        raise error
    return size


def _saved(size: int) -> tuple[int, list[str]]:
    """Return the number of bytes to back up, and notes. The copy buffers are taken into account.

    If the option host_bytes is the limit, the backup may use the full limit, because the user
    chose it.
    """
    held, available = _C.host_memory()
    most = int(_C.option("host_bytes"))
    by_option = most > 0 and available >= max(0, most - held)
    if by_option:
        fits, why = available, f"the option host_bytes allows {size_text(available)}"
    else:
        fits = max(0, int((available - 2 * buffer_bytes(size, size)) * _HOST_PART))
        why = f"{size_text(available)} of host memory are available, of which half may be used"
    saved = min(size, fits) // GRAIN * GRAIN
    if saved == size:
        return saved, []
    told = f"{size_text(saved)} are backed up" if saved else "no backup is measured"
    return saved, [f"{told}: {why}"]
