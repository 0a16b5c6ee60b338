"""Pause and resume without a backup: the workloads kv, discarded and many.

All libraries' processes, and that of the driver's bare calls, take turns, cycle by cycle in
rotating order; all but the one whose turn it is are paused, so that each meets the same device.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import comparison
import workloads
from children import Child, Failed, attempt
from libraries import OURS, PEERS, Library, open_library
from raw_driver import LIMIT, RawDriver
from saved import GIVEN_BACK
from serve import Worker
from workloads import GIB, MANY, MIB

WORKLOADS = ("kv", "discarded", "many")

Times = dict[str, dict[str, list[float]]]  # by child, by "pause_ms" and "resume_ms"


class Tensors:
    """A library with the workloads' tensors."""

    def __init__(self, library: Library, counted: bool) -> None:
        self.pause, self.resume = library.pause, library.resume
        self._library = library
        self._counted = counted  # whether the library counts allocations
        self._tensors: dict[str, list[Any]] = {}
        self._addresses: dict[str, list[int]] = {}

    def setup(self, workload: str, kv_gib: int) -> int:
        """Makes the tensors; their bytes."""
        before = self._segments()
        with self._library.region(workload):
            tensors = self._allocate(workload, kv_gib)
        if workload == "many":
            made = [s for address, s in self._segments().items() if address not in before]
            if made != [2 * MIB] * MANY:
                raise RuntimeError(
                    f"torch made {len(made)} allocations of {sorted(set(made))} bytes, not {MANY} "
                    "of 2 MiB: this torch cuts up memory in another way"
                )
            if self._counted:
                self._check_count(workload)
        self._tensors[workload] = tensors
        self._addresses[workload] = [tensor.data_ptr() for tensor in tensors]
        self.use(workload)
        return sum(tensor.nbytes for tensor in tensors)

    def use(self, workload: str) -> None:
        """Writes to all of the memory, as its user would."""
        tensors = self._tensors[workload]
        for tensor in tensors:
            tensor.fill_(1)
        if [tensor.data_ptr() for tensor in tensors] != self._addresses[workload]:
            raise RuntimeError(f"an address of {workload} moved")

    @staticmethod
    def _allocate(workload: str, kv_gib: int) -> list[Any]:
        if workload == "kv":
            return workloads.blocks(kv_gib, GIB)
        if workload == "discarded":
            return workloads.decoder()
        # torch asks for 2 MiB of memory where a tensor has up to 1 MiB; from there to 10 MiB it
        # asks for 20 MiB and cuts that up itself: 10,000 tensors of 2 MiB would be 1,000
        # allocations. Tensors of 1 MiB fill a segment of 2 MiB two by two: 20,000 of them are
        # 10,000 allocations of 2 MiB, in either library. `setup` counts them.
        return workloads.blocks(2 * MANY, MIB)

    @staticmethod
    def _segments() -> dict[int, int]:
        """Address and bytes of what torch got for pools other than its own."""
        import torch

        return {
            segment["address"]: segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) != (0, 0)
        }

    @staticmethod
    def _check_count(tag: str) -> None:
        import memsaver

        rows = memsaver.stats()[tag]
        counted = sum(row.allocations for row in rows), sum(row.allocated_bytes for row in rows)
        if counted != (MANY, MANY * 2 * MIB):
            raise RuntimeError(f"memsaver counts {counted} allocations and bytes in {tag}")


class Bare:
    """The driver's calls for as many bytes."""

    def __init__(self) -> None:
        self._driver = RawDriver()
        self.pause, self.resume, self.use = (
            self._driver.pause,
            self._driver.resume,
            self._driver.use,
        )

    def setup(self, workload: str, kv_gib: int) -> int:
        """Maps the workload's bytes; how many."""
        total = {
            "kv": kv_gib * GIB,
            "discarded": workloads.decoder_bytes(),
            "many": MANY * 2 * MIB,
        }
        return self._driver.setup(workload, total[workload])


class Discarding(Worker):
    """Pauses and resumes without a backup."""

    def __init__(self, name: str, kv_gib: int) -> None:
        workloads.start_cuda()
        self._kv_gib = kv_gib
        self._memory = Bare() if name == LIMIT else Tensors(open_library(name), name == OURS)

    def setup(self, workload: str) -> dict[str, Any]:
        """Makes the workload's memory and leaves it mapped."""
        size = self._memory.setup(workload, self._kv_gib)
        workloads.synchronise()
        workloads.stop_collecting()
        return {"bytes": size}

    def pause(self, workload: str) -> dict[str, Any]:
        """Pauses a mapped workload."""
        before = workloads.free_bytes()
        milliseconds = workloads.timed_ms(lambda: self._memory.pause(workload))
        return {"pause_ms": milliseconds, "freed": workloads.free_bytes() - before}

    def resume(self, workload: str) -> dict[str, Any]:
        """Resumes a paused workload and uses its memory."""
        milliseconds = workloads.timed_ms(lambda: self._memory.resume(workload))
        self._memory.use(workload)
        workloads.synchronise()
        return {"resume_ms": milliseconds}

    def at_once(self, workload: str) -> dict[str, Any]:
        """Pauses a mapped workload, and resumes it without a wait."""
        paused = workloads.timed_ms(lambda: self._memory.pause(workload))
        resumed = workloads.timed_ms(lambda: self._memory.resume(workload))
        self._memory.use(workload)
        workloads.synchronise()
        return {"pause_ms": paused, "resume_ms": resumed}


def take_turns(
    children: Sequence[Child], workload: str, cycles: int, gap: float
) -> tuple[Times, Times]:
    """Every child's times with the wait and without it. All are left paused."""
    spaced: Times = {child.name: {"pause_ms": [], "resume_ms": []} for child in children}
    at_once: Times = {child.name: {"pause_ms": [], "resume_ms": []} for child in children}

    sizes: dict[str, int] = {}

    def pause(child: Child) -> None:
        reply = child.ask("pause", workload=workload)
        freed, size = reply["freed"], sizes[child.name]
        if freed < GIVEN_BACK * size:
            raise Failed(f"{child.name} gave back {freed} of {size} bytes of {workload}")
        spaced[child.name]["pause_ms"].append(reply["pause_ms"])
        time.sleep(gap)

    for child in children:
        sizes[child.name] = child.ask("setup", workload=workload)["bytes"]
        pause(child)
    for cycle in range(cycles):
        first = cycle % len(children)
        for child in [*children[first:], *children[:first]]:
            reply = child.ask("resume", workload=workload)
            spaced[child.name]["resume_ms"].append(reply["resume_ms"])
            pause(child)
    for child in children:
        child.ask("resume", workload=workload)
        for _ in range(cycles):
            reply = child.ask("at_once", workload=workload)
            for key, values in at_once[child.name].items():
                values.append(reply[key])
        child.ask("pause", workload=workload)
        time.sleep(gap)
    return spaced, at_once


def label(workload: str, kv_gib: int) -> str:
    """The workload in the name of a metric."""
    return {"kv": f"kv_{kv_gib}GiB", "discarded": "discarded_16GB", "many": "many_10k"}[workload]


def rows(name: str, times: Times, suffix: str) -> Iterator[dict[str, Any]]:
    """A row for each of pause and resume, and each peer."""
    for key in ("pause_ms", "resume_ms"):
        metric = f"{name}_{key.removesuffix('_ms')}{suffix}_ms"
        values = {child: found[key] for child, found in times.items()}
        yield from comparison.compared(metric, values, values[LIMIT])
        if not set(PEERS) & set(values):
            comparison.tell(metric, values[OURS])
            comparison.tell(f"{metric}, {LIMIT}", values[LIMIT])


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Rows of the workloads that are asked for."""
    names = [OURS, LIMIT, *(PEERS if options.peer else ())]
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(Child("parts.discarded:Discarding", name, kv_gib=options.kv_gib))
            for name in names
        ]
        for workload in WORKLOADS:
            if workload not in options.only:
                continue
            with attempt(failures):
                spaced, at_once = take_turns(children, workload, options.cycles, options.gap)
                name = label(workload, options.kv_gib)
                yield from rows(name, spaced, "")
                yield from rows(name, at_once, "_at_once")
