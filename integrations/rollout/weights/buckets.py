"""Buckets: groups of tensors that are sent to an engine together in one block of memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["ALIGNMENT", "Bucket", "Slot", "buckets_of"]

ALIGNMENT = 512  # bytes; suits every type, and is the fastest for copies and collectives


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in its bucket.

    Attributes:
        name: the tensor's name.
        begin: the offset of the tensor's first byte in the bucket; a multiple of `ALIGNMENT`.
        room: the number of bytes reserved for the tensor. A rank with a smaller shard uses fewer
            bytes.
    """

    name: str
    begin: int
    room: int


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent together.

    Attributes:
        slots: the places of the tensors, in order.
    """

    slots: tuple[Slot, ...]

    @property
    def nbytes(self) -> int:
        """The number of bytes from the start of the first tensor to the end of the last tensor."""
        last = self.slots[-1]
        return last.begin + last.room

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors."""
        return tuple(slot.name for slot in self.slots)


def buckets_of(tensors: Iterable[tuple[str, int]], max_bytes: int) -> list[Bucket]:
    """Divide tensors into as few buckets as possible, in order. No tensor is split.

    Args:
        tensors: the name and the size in bytes of each tensor.
        max_bytes: the maximum size of a bucket. A larger tensor gets its own bucket, so the largest
            bucket can be as large as the largest tensor.
    """
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    end = 0
    for name, nbytes in tensors:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        if slots and begin + nbytes > max_bytes:
            buckets.append(Bucket(tuple(slots)))
            slots, begin = [], 0
        slots.append(Slot(name, begin, nbytes))
        end = begin + nbytes
    return [*buckets, Bucket(tuple(slots))] if slots else buckets
