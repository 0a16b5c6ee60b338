"""The model: the contents and states of tags, and the contents that a resume restores."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from memsaver._runtime.native import _C

PAGE = 2 << 20  # the granularity of device memory
UNIT = 512


def block_bytes(nbytes: int) -> int:
    """Return the size rounded up to 512 bytes, or to whole pages if the size is at least one
    page.
    """
    rounded = -(-nbytes // UNIT) * UNIT
    return rounded if rounded < PAGE else -(-rounded // PAGE) * PAGE


class Owner:
    """A tensor that owns a block.

    Deleting the tensor frees the block once no importer uses the block.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        array = (ctypes.c_char * nbytes).from_address(address)
        self._finalizer = weakref.finalize(array, self._free, address)
        self.tensor: Any = torch.frombuffer(array, dtype=torch.uint8)
        self.freed = threading.Event()
        self.error: Exception | None = None

    def delete(self) -> None:
        """Delete the tensor. Raises the error of the free, unless the free happens later."""
        self.tensor = None
        if self.error is not None:
            raise self.error

    def disown(self) -> None:
        """Delete the tensor without freeing any memory."""
        self._finalizer.detach()
        self.tensor = None

    def _free(self, address: int) -> None:
        try:
            _C.free(address)
        except Exception as error:
            self.error = error
        self.freed.set()


@dataclass(eq=False)
class Allocation:
    """A block with its contents while its tag is mapped."""

    tag: Tag
    device: int
    address: int
    contents: bytearray = field(repr=False)
    owner: Owner | None = None  # of a block that was sent
    in_transit: int = 0  # messages about the block that nobody has received
    users: list[int] = field(default_factory=list)  # importers, one entry for each use

    @property
    def is_deleted(self) -> bool:
        """Return whether only importers or messages in transit keep the block alive."""
        return self.owner is not None and self.owner.tensor is None

    @property
    def nbytes(self) -> int:
        return len(self.contents)

    def set(self, value: int) -> None:
        """Set every byte of the contents in place, because a new object would cause more page
        faults.
        """
        ctypes.memset((ctypes.c_char * 1).from_buffer(self.contents), value, self.nbytes)


@dataclass(eq=False)
class Tag:
    """A tag. If `kept` is true for a paused tag, a resume restores the tag's contents."""

    name: str
    policy: str = "none"
    paused: bool = False
    saved: str = "none"  # the backup of a paused tag's pause
    retained: bool = False  # paused by a pause whose rollback failed: its pages are retained
    unknown: bool = False  # contents without a backup that a failed swap may have overwritten
    known: str | None = None  # the kind of the kept backup, if it is known to equal the memory
    owing: bool = False  # a free could not release memory, which counts until the next change
    regions: int = 0  # open regions on all threads
    shareable: bool = False
    mixed: bool = False  # some of its memory may be older than `shareable`
    pauses: int = 0  # so far; each replaces the memory that importers know
    allocations: list[Allocation] = field(default_factory=list)

    @property
    def kept(self) -> bool:
        return self.saved != "none" or self.retained

    def pause(self, backup: str | None) -> None:
        if not self.paused:
            self.paused, self.saved = True, backup or self.policy
            self.pauses += 1

    def park(self) -> None:
        """Record a failed pause whose unmapped pages could not be mapped again."""
        self.paused, self.saved, self.retained, self.known = True, "none", True, None
        self.pauses += 1

    def resume(self, fill: int) -> None:
        """Resume the tag; discarded contents become bytes with this value."""
        if self.paused and not self.kept:
            self.known = None
            for allocation in self.allocations:
                allocation.set(fill)
        self.mixed = self.mixed and (self.retained or not self.paused)
        self.paused, self.saved, self.retained = False, "none", False

    @property
    def is_imported(self) -> bool:
        """Return whether another process uses the tag's memory, so that the tag cannot be
        paused.
        """
        return any(each.users for each in self.allocations)

    def on(self, device: int) -> list[Allocation]:
        return [each for each in self.allocations if each.device == device]

    def ranges(self, device: int | None = None) -> list[tuple[int, int]]:
        return sorted(
            (each.address, each.nbytes)
            for each in self.allocations
            if device is None or each.device == device
        )

    def nbytes(self, device: int | None = None) -> int:
        return sum(nbytes for _, nbytes in self.ranges(device))


def pages_under(ranges: Iterable[tuple[int, int]]) -> int:
    """Return the total size of the pages that overlap any of the ranges."""
    pages: set[int] = set()
    for address, nbytes in ranges:
        pages.update(range(address // PAGE, -(-(address + nbytes) // PAGE)))
    return len(pages) * PAGE
