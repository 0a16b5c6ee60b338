"""Measurements of the driver calls that create, map, unmap and release memory."""

from __future__ import annotations

from collections.abc import Callable

from memsaver._runtime.text import size_text
from memsaver.cli.bare_driver import PIECE, BareDriver, BareMemory
from memsaver.cli.measurements.figures import Figure, seconds_of

__all__ = ["CREATE", "MAP", "RELEASE", "UNMAP", "measure_driver"]

CREATE, MAP = "driver, create", "driver, map"
UNMAP, RELEASE = "driver, unmap", "driver, release"

_TITLES = {
    CREATE: "create",
    MAP: "map and set access",
    UNMAP: "unmap",
    RELEASE: "release",
}


def measure_driver(
    driver: BareDriver, memory: BareMemory, rounds: int, rest: Callable[[], None]
) -> list[Figure]:
    """Time each of the four calls for all of `memory`, which must not be mapped.

    Unmaps and releases the memory again. Needs the device's context. `rest` is called before memory
    is created. The driver clears memory after the release, and an immediate allocation would have
    to wait until the memory is cleared.
    """
    seconds: dict[str, list[float]] = {name: [] for name in _TITLES}
    for _ in range(rounds):
        rest()
        seconds[CREATE].append(seconds_of(memory.create))
        seconds[MAP].append(seconds_of(memory.map))
        driver.fill(memory.address, 1, memory.bytes)
        seconds[UNMAP].append(seconds_of(memory.unmap))
        seconds[RELEASE].append(seconds_of(memory.release))
    group = f"driver, pieces of {size_text(min(memory.bytes, PIECE))}"
    return [
        Figure(name, group, title, memory.bytes, tuple(seconds[name]))
        for name, title in _TITLES.items()
    ]
