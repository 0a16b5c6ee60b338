"""Measurements of the bus, with plain copies between the device and pinned host memory."""

from __future__ import annotations

from memsaver.cli.bare_driver import BareDriver, BareMemory, PinnedMemory
from memsaver.cli.measurements.figures import Figure, seconds_of

__all__ = ["BUFFER", "IN", "OUT", "buffer_bytes", "measure_bus"]

BUFFER = 1 << 30  # bytes of host memory per direction, copied repeatedly
OUT, IN = "bus, to the host", "bus, to the device"
BOTH = "bus, both at once"
GROUP = "bus, pinned memory"


def buffer_bytes(memory_bytes: int, total: int) -> int:
    """Return the bytes of pinned host memory that `measure_bus` needs for each direction."""
    return min(BUFFER, total, memory_bytes // 2)


def measure_bus(driver: BareDriver, memory: BareMemory, total: int, rounds: int) -> list[Figure]:
    """Measure copies of `total` bytes in each direction, separately and in both directions at once.

    The copies use two buffers of `buffer_bytes` bytes repeatedly. `memory` must be mapped. Needs
    the device's context.
    """
    size = buffer_bytes(memory.bytes, total)
    pieces = [min(size, total - at) for at in range(0, total, size)]
    seconds: dict[str, list[float]] = {OUT: [], IN: [], BOTH: []}
    host = [PinnedMemory(driver, size)]
    try:
        host.append(PinnedMemory(driver, size))
        with driver.stream() as out, driver.stream() as into:

            def copy(outwards: bool, inwards: bool) -> None:
                for nbytes in pieces:
                    if outwards:
                        host[0].to_host(memory.address, nbytes, out)
                    if inwards:
                        host[1].to_device(memory.address + size, nbytes, into)
                driver.call("cuStreamSynchronize", out)
                driver.call("cuStreamSynchronize", into)

            copy(True, True)
            for _ in range(rounds):
                seconds[OUT].append(seconds_of(lambda: copy(True, False)))
                seconds[IN].append(seconds_of(lambda: copy(False, True)))
                seconds[BOTH].append(seconds_of(lambda: copy(True, True)))
    finally:
        for buffer in host:
            buffer.close()
    return [
        Figure(OUT, GROUP, "copy to the host", total, tuple(seconds[OUT])),
        Figure(IN, GROUP, "copy to the device", total, tuple(seconds[IN])),
        Figure(BOTH, GROUP, "both at once, in total", 2 * total, tuple(seconds[BOTH])),
    ]
