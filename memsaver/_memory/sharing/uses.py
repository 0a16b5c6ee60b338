"""Another process's memory, mapped in this process, and its uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memsaver._runtime.latches import Latch
from memsaver._runtime.native import _C
from memsaver.errors import MemsaverError

__all__ = ["Extent", "ImportRequest", "Place", "Span", "Use"]


class Place(NamedTuple):
    """The place of a tensor's memory in the process that sent it."""

    endpoint: str
    token: int
    tag: str
    span_address: int
    span_bytes: int
    address: int
    nbytes: int
    ids: tuple[int, ...]  # the ids of the extents that contain the memory
    device: str  # see importing.name_of


class Extent:
    """An extent of another process's memory, mapped in this process."""

    __slots__ = ("id", "nbytes", "offset", "span", "users", "wanted")

    def __init__(self, span: Span, offset: int, nbytes: int, number: int) -> None:
        self.span, self.offset, self.nbytes, self.id = span, offset, nbytes, number
        self.users = 0  # uses in progress
        self.wanted = False  # whether it is released when its last use ends


class Span:
    """The addresses in this process that represent one span of another process."""

    def __init__(self, ordinal: int, nbytes: int) -> None:
        self.native = _C.ForeignSpan(ordinal, nbytes)
        self.nbytes = nbytes
        self.at: dict[int, Extent] = {}  # by offset

    def unmap(self, extents: Sequence[Extent]) -> list[Extent]:
        """Unmap extents, and return those that were unmapped, because the driver may refuse some or
        all.
        """
        try:
            self.native.unmap([extent.offset for extent in extents])
            return list(extents)
        except MemsaverError:  # some may be unmapped already, and must not be used again
            return [extent for extent in extents if self._unmap(extent)]

    def _unmap(self, extent: Extent) -> bool:
        try:
            self.native.unmap([extent.offset])  # does nothing if it is unmapped
            return True
        except MemsaverError:
            return False


class Use:
    """A use of a sent tensor's memory, begun and ended by the connection's thread."""

    __slots__ = ("extents", "place")

    def __init__(self, place: Place) -> None:
        self.place = place
        self.extents: list[Extent] = []  # counted as used until the use ends

    @property
    def address(self) -> int:
        """The tensor's address in this process, which is valid until the use ends."""
        return self.extents[0].span.native.address + self.place.address - self.place.span_address


class ImportRequest:
    """A request to begin uses of one tag's memory on one device. Either all uses begin, or none."""

    def __init__(self, uses: Sequence[Use], ordinal: int) -> None:
        self.uses, self.ordinal = uses, ordinal
        self.tag = uses[0].place.tag
        self.is_held = False  # whether the other process keeps the memory for these uses
        self.is_decided = Latch()  # set when the uses have begun, or after an error
        self.error: BaseException | None = None
