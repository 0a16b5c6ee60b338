"""All figures of one device, with sizes that fit its free memory and the host's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import memsaver
from memsaver.bare_driver import GRANULARITY, BareDriver, BareMemory
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
from memsaver.native import _C, Backup
from memsaver.text import size_text

__all__ = ["Measured", "measure_machine"]

MOST = 16 << 30  # bytes, where nobody says: as the weights of a model of 8 billion parameters
SIMULATED = 256 << 20  # the same on the simulated driver, which copies by the CPU
REST = 0.5  # seconds in which the driver clears memory that was released

_FREE_PART = 0.8  # of the device's free memory, at most, where nobody says
_HOST_PART = 0.5  # of the host's, at most: another process may want some too


@dataclass
class Measured:
    """What was measured of a device.

    Attributes:
        device: the device's index.
        name: its name.
        driver: the CUDA version that the driver supports: 13000 for 13.0.
        simulated: whether it is the simulated driver, whose times mean nothing.
        size: bytes of the memory that was mapped, unmapped, paused and resumed.
        saved: bytes that were backed up; 0 where no backup was measured.
        rounds: how often each thing was done; the first pause once.
        figures: in the order in which they are shown.
        notes: what a reader has to know to read them right.
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

    Starts the device's context, and takes so much of its memory for some seconds; pinned host
    memory for the copies, and for the backup as much again. All of it is given back.

    Args:
        size: bytes to measure with, rounded down to 32 MiB; None: up to 16 GiB, what fits into
            four fifths of the free memory. What is backed up is less where the host has less.
        rounds: how often to do each thing.
        device: the device's index.
        telling: is called with what is done next, in words.

    Raises:
        ConfigError: there is no such device, or the size is too small.
        OutOfDeviceMemoryError: so much is not free.
        NotLoadedError: no driver.
        DriverError: a driver call failed.
        MemsaverError: contents came back wrong.
    """
    driver = BareDriver()
    count = driver.device_count()
    if not 0 <= device < count:
        raise ConfigError(f"there is no device {device}: the driver offers {count}")
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
        tag = CycledTag(driver, device, chosen, Backup.NONE, notes)
        try:
            measured.figures += measure_discarded(tag, limits, rounds, rest)
        finally:
            tag.close()
        if saved:
            telling("measuring pauses and resumes with a backup")
            tag = CycledTag(driver, device, saved, Backup.HOST, notes)
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
        raise ConfigError(f"a size of {asked} bytes is too small: {size_text(GRAIN)} at least")
    if size == 0 or size + GRANULARITY > free:
        error = OutOfDeviceMemoryError(
            f"device {device} has {size_text(free)} free, and the benchmark needs "
            f"{size_text(max(size, GRAIN))}: end what uses the GPU, or choose a smaller size"
        )
        error.needed, error.free = max(size, GRAIN), free
        raise error
    return size


def _saved(size: int) -> tuple[int, list[str]]:
    """How many bytes to back up, and what to say of it. The copies' buffers are pinned before.

    All that the option host_bytes leaves, where that is the limit: somebody said so.
    """
    held, available = _C.host_memory()
    most = int(_C.option("host_bytes"))
    by_option = most > 0 and available >= max(0, most - held)
    if by_option:
        fits, why = available, f"the option host_bytes allows {size_text(available)}"
    else:
        fits = max(0, int((available - 2 * buffer_bytes(size, size)) * _HOST_PART))
        why = f"{size_text(available)} of host memory are available, of which half may be taken"
    saved = min(size, fits) // GRAIN * GRAIN
    if saved == size:
        return saved, []
    told = f"{size_text(saved)} are backed up" if saved else "no backup is measured"
    return saved, [f"{told}: {why}"]
