"""Provide tensors with a backup, and a plain copy whose speed is an upper bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import workloads
from libraries import Library
from workloads import GIB

LEAST_RELEASED = 0.98  # minimum fraction of the tensors' bytes to release, per the driver


class Saved:
    """A tag with a backup; the tag's memory is full of random bits.

    The methods raise RuntimeError if contents, addresses or the amount of freed memory are wrong.
    """

    def __init__(
        self,
        library: Library,
        tag: str,
        backup: str,
        make: Callable[[], list[Any]],
        devices: Sequence[int] = (0,),
        seed: int = 1,
    ) -> None:
        self.tag = tag
        self._library = library
        self._devices = tuple(devices)
        with library.region(tag, backup, devices):
            self.tensors = make()
        workloads.randomise(self.tensors, seed)
        self.bytes = sum(tensor.nbytes for tensor in self.tensors)
        self._addresses = [tensor.data_ptr() for tensor in self.tensors]
        self._sums: Any = None
        self.remember()
        workloads.stop_collecting()

    def change(self, tensors: slice = slice(None)) -> None:
        """Change all words of the chosen tensors."""
        workloads.change(self.tensors[tensors])

    def remember(self) -> None:
        """Record the contents, for `check`."""
        self._sums = workloads.sums(self.tensors)
        workloads.synchronise(self._devices)

    def check(self) -> None:
        """Compare the addresses and the contents with the recorded values."""
        if [tensor.data_ptr() for tensor in self.tensors] != self._addresses:
            raise RuntimeError(f"an address of {self.tag} moved")
        wrong = int((workloads.sums(self.tensors) != self._sums).sum())
        if wrong:
            raise RuntimeError(
                f"{wrong} of {len(self._sums)} pieces of {self.tag} have changed in the resume"
            )

    def pause(self) -> float:
        """Pause the tag, and return the duration in milliseconds."""
        self.remember()
        before = workloads.free_bytes(self._devices)
        spent = workloads.timed_ms(lambda: self._library.pause(self.tag), self._devices)
        freed = workloads.free_bytes(self._devices) - before
        if freed < LEAST_RELEASED * self.bytes:
            raise RuntimeError(f"a pause of {self.tag} released {freed} of {self.bytes} bytes")
        return spent

    def resume(self) -> float:
        """Resume the tag, check its contents, and return the resume's duration in milliseconds."""
        spent = workloads.timed_ms(lambda: self._library.resume(self.tag), self._devices)
        self.check()
        return spent


class PlainCopy:
    """Repeated copies of `total` bytes between a device and a pinned buffer of 1 GiB."""

    def __init__(self, total: int, gpu: int = 0) -> None:
        import torch

        self._torch = torch
        self._sizes = [min(GIB, total - at) for at in range(0, total, GIB)]
        self._host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True).fill_(1)
        self._device = torch.empty(GIB, dtype=torch.uint8, device=f"cuda:{gpu}").fill_(1)
        self._other: PlainCopy | None = None  # owns the buffers for the other direction

    def queue_out(self) -> None:
        """Queue copies from the device, without waiting."""
        self._copy(self._host, self._device)

    def queue_in(self) -> None:
        """Queue copies to the device, without waiting."""
        self._copy(self._device, self._host)

    def _copy(self, target: Any, source: Any) -> None:
        for size in self._sizes:
            target[:size].copy_(source[:size], non_blocking=True)

    def out_ms(self) -> float:
        """Copy from the device, and return the duration in milliseconds."""
        return workloads.timed_ms(self.queue_out)

    def in_ms(self) -> float:
        """Copy to the device, and return the duration in milliseconds."""
        return workloads.timed_ms(self.queue_in)

    def both_ms(self) -> float:
        """Copy `total` bytes in both directions at once; return the duration in milliseconds."""
        if self._other is None:
            self._other = PlainCopy(sum(self._sizes))
            self._streams = self._torch.cuda.Stream(), self._torch.cuda.Stream()
        other = self._other

        def copies() -> None:
            with self._torch.cuda.stream(self._streams[0]):
                self._copy(self._host, self._device)
            with self._torch.cuda.stream(self._streams[1]):
                self._copy(other._device, other._host)

        return workloads.timed_ms(copies)
