"""Measurements of memsaver's pauses and resumes of one tag, with checks of memory and contents."""

from __future__ import annotations

from collections.abc import Callable

import memsaver
from memsaver._runtime.native import _C, Backup, backup_code
from memsaver.cli.bare_driver import BareDriver
from memsaver.cli.measurements.bus import IN, OUT
from memsaver.cli.measurements.driver_calls import CREATE, MAP, RELEASE, UNMAP
from memsaver.cli.measurements.figures import Figure, Limits, seconds_of
from memsaver.errors import MemsaverError

__all__ = ["BLOCKS", "GRAIN", "CycledTag", "measure_backed_up", "measure_discarded"]

BLOCKS = 16  # allocations of equal size in the tag
GRAIN = BLOCKS * (2 << 20)  # the tag's bytes are a multiple of this

_SAMPLE = 4096  # bytes that are compared at both ends of every block
# The minimum share of the bytes that a pause must release, as measured by the driver's free memory.
_GIVEN_BACK = 0.98
_LIMITS = {  # the description of a limit, and the figures whose sum is the limit
    "unmap, release": (UNMAP, RELEASE),
    "create, map": (CREATE, MAP),
    "copy out": (OUT,),
    "copy in": (IN,),
}


class CycledTag:
    """A tag with known contents, for use in the device's context, by one thread.

    Args:
        driver: the driver.
        device: the device's index.
        nbytes: the size in bytes, a multiple of `GRAIN`.
        backup: the tag's policy.
        doubts: a list to which the object adds a message for each unexpected result.

    Raises:
        OutOfDeviceMemoryError: the device has too little free memory.
    """

    def __init__(
        self, driver: BareDriver, device: int, nbytes: int, backup: Backup, doubts: list[str]
    ) -> None:
        self.bytes = nbytes
        self._driver, self._device, self._doubts = driver, device, doubts
        self._has_backup = backup != "none"
        self._tag = f"memsaver bench, {backup}"
        self._block = nbytes // BLOCKS
        self._value = 0
        self._addresses: list[int] = []
        # `memsaver.region` would need torch; this memory does not.
        _C.region_enter(self._tag, backup_code(backup))
        try:
            for _ in range(BLOCKS):
                self._addresses.append(_C.malloc(self._block, device))
        except MemsaverError:
            self.close()
            raise
        finally:
            _C.region_exit()

    def fill(self) -> None:
        """Fill every block with new contents."""
        self._value += 1
        for index, address in enumerate(self._addresses):
            self._driver.fill(address, self._byte(index), self._block)

    def pause(self) -> float:
        """Pause the tag on an idle device, check the freed memory, and return the duration."""
        before = memsaver.device_memory(self._device)[0]
        seconds = seconds_of(lambda: memsaver.pause(self._tag))
        freed = memsaver.device_memory(self._device)[0] - before
        if freed < _GIVEN_BACK * self.bytes:
            self._doubts.append(
                f"the driver counted {freed} bytes more as free after a pause of {self.bytes}: "
                "another process uses this GPU too, so the figures do not measure memsaver alone"
            )
        return seconds

    def resume(self) -> float:
        """Resume the tag, check its contents, and return the resume's duration in seconds.

        Raises:
            MemsaverError: the contents differ.
        """
        seconds = seconds_of(lambda: memsaver.resume(self._tag))
        lost = 0xFF if memsaver.options().poison else 0  # the value of a byte without a backup
        for index, address in enumerate(self._addresses):
            expected = bytes([self._byte(index) if self._has_backup else lost]) * _SAMPLE
            for at in (address, address + self._block - _SAMPLE):
                if self._driver.read(at, _SAMPLE) != expected:
                    raise MemsaverError(
                        f"tag {self._tag!r} resumed with different contents at {at:#x}; "
                        "please report it",
                        tag=self._tag,
                    )
        return seconds

    def close(self) -> None:
        """Free all memory, including the retained backup. The tag can be used again."""
        while self._addresses:
            _C.free(self._addresses.pop())
        memsaver.resume(self._tag)  # maps nothing; needed only if an error left the tag paused
        memsaver.trim(wait=True)

    def _byte(self, index: int) -> int:
        return (self._value * 31 + index) % 255 + 1


def measure_discarded(
    tag: CycledTag, limits: Limits, rounds: int, rest: Callable[[], None]
) -> list[Figure]:
    """Measure pauses and resumes without a backup, and compare them with the driver's calls.

    `rest` is called between a pause and its resume (see `measure_driver`). The first cycle is
    ignored, because its resume merges memory into fewer pieces.
    """
    pauses, resumes = [], []
    for _ in range(rounds + 1):
        tag.fill()
        pauses.append(tag.pause())
        rest()
        resumes.append(tag.resume())
    rows = [
        ("pause, none", "pause", pauses[1:], "unmap, release"),
        ("resume, none", "resume", resumes[1:], "create, map"),
    ]
    return _figures("no backup", rows, tag.bytes, limits)


def measure_backed_up(tag: CycledTag, limits: Limits, rounds: int) -> list[Figure]:
    """Measure pauses with a backup in pinned host memory, and their resumes.

    The limits are the times of plain copies. The first pause allocates the host memory, which later
    pauses reuse. If the contents are unchanged and fingerprints are on, a pause copies nothing, so
    the driver's calls are the limit.
    """
    tag.fill()
    first = tag.pause()
    resumes = [tag.resume()]
    changed, unchanged = [], []
    for _ in range(rounds):
        tag.fill()
        changed.append(tag.pause())
        resumes.append(tag.resume())
    rows = [
        ("pause, host, first", "first pause", [first], "copy out"),
        ("pause, host, changed", "pause, all changed", changed, "copy out"),
    ]
    if _C.option("fingerprints") == "on":
        for _ in range(rounds):
            unchanged.append(tag.pause())
            resumes.append(tag.resume())
        rows.append(("pause, host, unchanged", "pause, unchanged", unchanged, "unmap, release"))
    rows.append(("resume, host", "resume", resumes, "copy in"))
    return _figures("backup on the host", rows, tag.bytes, limits)


def _figures(
    group: str, rows: list[tuple[str, str, list[float], str]], nbytes: int, limits: Limits
) -> list[Figure]:
    """Return a figure for each row, which contains a name, a title, seconds, and a limit's
    description.
    """
    figures = []
    for name, title, seconds, limit in rows:
        least = limits.seconds(nbytes, *_LIMITS[limit])
        figures.append(Figure(name, group, title, nbytes, tuple(seconds), limit, least))
    return figures
