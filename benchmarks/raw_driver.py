"""Bare driver calls, a lower bound on the time of any pause or resume without a backup."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memsaver.cli.bare_driver import BareDriver, BareMemory

# memsaver is imported only inside functions: paired.py's children import this module with an
# earlier memsaver, whose modules have other names.

LIMIT = "driver"


def count_gpus() -> int:
    """Return the number of GPUs; 0 if there is no driver. Creates no context."""
    from memsaver.cli.bare_driver import BareDriver
    from memsaver.errors import MemsaverError

    try:
        return BareDriver().device_count()
    except MemsaverError:
        return 0


class RawDriver:
    """The minimum of driver calls that any library must make for its tags. Tags are not freed."""

    def __init__(self) -> None:
        from memsaver.cli.bare_driver import BareDriver

        self._driver: BareDriver = BareDriver()
        self._memory: dict[str, BareMemory] = {}

    def setup(self, tag: str, total: int) -> int:
        """Map `total` bytes, rounded up to the granularity; return the number of bytes."""
        from memsaver.cli.bare_driver import BareMemory

        memory = self._memory[tag] = BareMemory(self._driver, total)
        memory.resume()
        self.use(tag)
        return memory.bytes

    def use(self, tag: str) -> None:
        """Write to all of the memory."""
        memory = self._memory[tag]
        self._driver.fill(memory.address, 1, memory.bytes)

    def pause(self, tag: str) -> None:
        """Unmap and release the memory."""
        self._memory[tag].pause()

    def resume(self, tag: str) -> None:
        """Allocate and map the memory."""
        self._memory[tag].resume()
