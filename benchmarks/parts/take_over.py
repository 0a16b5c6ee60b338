"""Measure the time that an engine saves by taking over a trainer's pages without copying.

take_over_16GB_ms: the trainer and the engine are both mapped before and after the takeover. The
peer is a copy of the decoder's 195 tensors with torch, from another process's shareable region into
the engine's tensors. A takeover replaces the copy with bare driver calls that import the trainer's
physical memory, map this memory in place of the engine's memory, and create new memory without
contents for the trainer.

take_over_asleep_16GB_ms: the engine is paused without a backup before the takeover, and the trainer
is paused without a backup after the takeover. The peer's bare driver calls create and map the
engine's memory, copy, and release the trainer's memory. The takeover's driver calls import and map
the trainer's memory in the engine, and unmap and release this memory in the trainer.

The driver calls are made for pieces of physical memory of several sizes, in one process. The
reported values belong to the size with the lowest median. The details list the values of all sizes.
A real implementation would also have to send a descriptor for each piece, and could take over only
pieces with equal contents. The details contain the percentages of such pieces (see page_shares.py).
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import comparison
import page_shares
import results
import workloads
from children import Child, Failed, attempt
from libraries import OURS
from serve import Worker
from workloads import MIB

from memsaver.cli.bare_driver import BareDriver, BareMemory
from parts.sharing import Receiver

COPY = "a copy on the GPU"
PIECES_MIB = (2, 32, 256, 1024)
SLOW_MIB = 2  # thousands of pieces: only in the first cycle

Times = dict[str, float]  # milliseconds, by step
Step = tuple[str, Callable[[], object]]


class Sides:
    """A trainer and an engine with mapped memory of the same size, in pieces of one size.

    The device's context must be current. Each measurement begins and ends with both sides mapped.
    At its end, each measurement checks that the engine's memory contains the trainer's bytes.
    """

    def __init__(self, driver: BareDriver, total: int, piece: int, gap: float) -> None:
        self._driver, self._piece, self._gap, self._seed = driver, piece, gap, 0
        self.trainer, self.engine = (
            BareMemory(driver, total, piece=piece, exportable=True) for _ in range(2)
        )
        self.trainer.resume()
        self.engine.resume()

    def close(self) -> None:
        """Release all memory."""
        self.trainer.close()
        self.engine.close()

    def awake(self) -> Times:
        """Take over the pages while both sides are mapped; the trainer receives new memory."""
        trainer, engine = self.trainer, self.engine
        return self._measured(
            ("engine unmaps", engine.unmap),
            ("engine releases", engine.release),
            ("engine imports", lambda: engine.import_from(trainer)),
            ("engine maps", engine.map),
            ("trainer unmaps", trainer.unmap),
            ("trainer releases", trainer.release),
            ("trainer creates", trainer.create),
            ("trainer maps", trainer.map),
        )

    def asleep(self) -> Times:
        """Measure a takeover by a paused engine, including the trainer's pause."""
        trainer, engine = self.trainer, self.engine
        engine.pause()
        times = self._measured(
            ("engine imports", lambda: engine.import_from(trainer)),
            ("engine maps", engine.map),
            ("trainer unmaps", trainer.unmap),
            ("trainer releases", trainer.release),
        )
        trainer.resume()
        return times

    def copied(self) -> Times:
        """Measure the engine's resume, a copy of the contents, and the trainer's pause."""
        trainer, engine = self.trainer, self.engine
        engine.pause()
        times = self._measured(
            ("engine creates", engine.create),
            ("engine maps", engine.map),
            ("copy", self._copy),
            ("trainer unmaps", trainer.unmap),
            ("trainer releases", trainer.release),
        )
        trainer.resume()
        return times

    def _measured(self, *steps: Step) -> Times:
        self._seed += 1
        for number, (at, size) in enumerate(self._places()):
            self._driver.fill(self.trainer.address + at, (self._seed + number) % 251, size)
        time.sleep(self._gap)  # the driver clears the memory that was released before
        times = {}
        for name, call in steps:
            start = time.perf_counter()
            call()
            times[name] = round(1e3 * (time.perf_counter() - start), 3)
        for number, (at, size) in enumerate(self._places()):
            last = self._driver.read(self.engine.address + at + size - 1, 1)[0]
            if last != (self._seed + number) % 251:
                raise Failed(f"pieces of {self._piece} bytes: the engine has other contents")
        return times

    def _places(self) -> Iterator[tuple[int, int]]:
        total = self.engine.bytes
        return ((at, min(self._piece, total - at)) for at in range(0, total, self._piece))

    def _copy(self) -> None:
        self._driver.call(
            "cuMemcpyDtoDAsync_v2",
            ctypes.c_uint64(self.engine.address),
            ctypes.c_uint64(self.trainer.address),
            ctypes.c_size_t(self.engine.bytes),
            ctypes.c_void_p(),
        )
        self._driver.call("cuStreamSynchronize", ctypes.c_void_p())


class Pages(Worker):
    """A worker for the driver calls of takeovers and copies; owns only the two sides' memory."""

    imports = ()

    def __init__(self, name: str, total: int, gap: float) -> None:
        self._driver, self._total, self._gap = BareDriver(), total, gap
        self._context = self._driver.context(0)
        self._context.__enter__()  # until the process exits

    def cycle(self, piece_mib: int) -> dict[str, Any]:
        """Return the times of each kind of transfer, by step, for pieces of this size."""
        sides = Sides(self._driver, self._total, piece_mib * MIB, self._gap)
        try:
            return {"awake": sides.awake(), "asleep": sides.asleep(), "copied": sides.copied()}
        finally:
            sides.close()


class Engine(Receiver):
    """A worker that copies received tensors, which are already mapped, into its weights."""

    def copy(self) -> dict[str, Any]:
        """Copy all tensors, and return the duration in milliseconds."""

        def copies() -> None:
            for weight, received in zip(self._weights, self._received, strict=True):
                weight.copy_(received)

        return {"ms": workloads.timed_ms(copies)}


def _copies(cycles: int) -> list[float]:
    """Return the durations of copies of the decoder from another process's region."""
    sender = Child("parts.sharing:Sender", OURS, kind="decoder", in_region=True)
    with sender, Child("parts.take_over:Engine", OURS, weights=True) as engine:
        expected = sender.ask("change")["sums"]
        engine.ask("read", data=sender.ask("send")["data"])
        times = [engine.ask("copy")["ms"] for _ in range(cycles)]
        if engine.ask("sums")["sums"] != expected:
            raise Failed("a copy on the GPU: the contents differ")
        engine.ask("close")
        return times


def rows(
    copies: Sequence[float],
    cycles: Mapping[int, Sequence[Mapping[str, Times]]],
    shares: Sequence[Mapping[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Yield the rows, computed from the copies' times and the transfers' times by piece size.

    If `copies` is empty, the row of take_over_16GB_ms is omitted.
    """

    def best(way: str) -> tuple[int, list[float]]:
        totals = {
            mib: [round(sum(cycle[way].values()), 3) for cycle in found]
            for mib, found in cycles.items()
        }
        return min(totals.items(), key=lambda item: statistics.median(item[1]))

    peers = {"asleep": ("take_over_asleep_16GB_ms", best("copied")[1])}
    if copies:
        peers["awake"] = ("take_over_16GB_ms", list(copies))
    for way, (metric, theirs) in peers.items():
        mib, ours = best(way)
        row = results.measurement(metric, ours, COPY, theirs)
        row["detail"]["piece_MiB"] = mib
        for name in ("awake",) if way == "awake" else ("asleep", "copied"):
            row["detail"][f"{name}_by_piece_MiB"] = {
                str(mib): _medians([cycle[name] for cycle in found])
                for mib, found in cycles.items()
            }
        if way == "awake":
            row["detail"]["equal_pages_percent"] = list(shares)
        yield row


def _medians(cycles: Sequence[Times]) -> Times:
    """Return the median of each step and the median of the sums."""
    with_sums = [{**cycle, "all": sum(cycle.values())} for cycle in cycles]
    return {
        name: round(statistics.median(cycle[name] for cycle in with_sums), 3)
        for name in with_sums[0]
    }


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows for take_over_*."""
    cycles: dict[int, list[dict[str, Times]]] = {mib: [] for mib in PIECES_MIB}
    copies: list[float] = []
    total = workloads.decoder_bytes()
    with attempt(failures):
        with Child("parts.take_over:Pages", OURS, total=total, gap=options.gap) as pages:
            for cycle in range(options.cycles):
                for mib, found in cycles.items():
                    if mib != SLOW_MIB or not cycle:
                        found.append(pages.ask("cycle", piece_mib=mib))
                        times = [round(sum(way.values()), 3) for way in found[-1].values()]
                        comparison.show(f"take_over, {mib} MiB: ms of {list(found[-1])}", times)
        with attempt(failures):
            copies = _copies(options.cycles)
        yield from rows(copies, cycles, list(page_shares.shares()))
