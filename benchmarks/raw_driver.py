"""The driver's bare calls: the limit of what any library can do without a backup."""

from __future__ import annotations

from memsaver.bare_driver import BareDriver, BareMemory
from memsaver.errors import MemsaverError

LIMIT = "driver"


def count_gpus() -> int:
    """The GPUs that the driver offers; 0 without one. Starts no context."""
    try:
        return BareDriver().device_count()
    except MemsaverError:
        return 0


class RawDriver:
    """The calls that any library must make, and no more, for each of some tags. Frees nothing."""

    def __init__(self) -> None:
        self._driver = BareDriver()
        self._memory: dict[str, BareMemory] = {}

    def setup(self, tag: str, total: int) -> int:
        """Maps so many bytes, rounded up to the granularity; how many."""
        memory = self._memory[tag] = BareMemory(self._driver, total)
        memory.resume()
        self.use(tag)
        return memory.bytes

    def use(self, tag: str) -> None:
        """Writes to all of the memory."""
        memory = self._memory[tag]
        self._driver.fill(memory.address, 1, memory.bytes)

    def pause(self, tag: str) -> None:
        """Unmaps and releases."""
        self._memory[tag].pause()

    def resume(self, tag: str) -> None:
        """Creates and maps."""
        self._memory[tag].resume()
