"""Buckets: the memory that tensors take their turns in on their way to an engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["ALIGNMENT", "Bucket", "Slot", "buckets_of"]

ALIGNMENT = 512  # bytes: of any type, and what copies and collectives are fastest at


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in its bucket.

    Attributes:
        name: the tensor's name.
        begin: its first byte; a multiple of `ALIGNMENT`.
        room: how many bytes it may take. On a rank whose shard is smaller it takes less.
    """

    name: str
    begin: int
    room: int


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together.

    Attributes:
        slots: the tensors, in their order.
    """

    slots: tuple[Slot, ...]

    @property
    def nbytes(self) -> int:
        """Bytes from the first tensor to the end of the last one."""
        last = self.slots[-1]
        return last.begin + last.room

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors."""
        return tuple(slot.name for slot in self.slots)


def buckets_of(tensors: Iterable[tuple[str, int]], most_bytes: int) -> list[Bucket]:
    """Tensors in as few buckets as their order allows. None is ever split.

    Args:
        tensors: names, and bytes of each.
        most_bytes: that a bucket may have. A tensor with more than that has one to itself, so that
            the largest bucket may be as large as the largest tensor.
    """
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    end = 0
    for name, nbytes in tensors:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        if slots and begin + nbytes > most_bytes:
            buckets.append(Bucket(tuple(slots)))
            slots, begin = [], 0
        slots.append(Slot(name, begin, nbytes))
        end = begin + nbytes
    return [*buckets, Bucket(tuple(slots))] if slots else buckets
