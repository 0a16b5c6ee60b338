"""Measure pauses and resumes without a backup, for the workloads kv, discarded and many.

The processes of all libraries and of the bare driver calls take turns cycle by cycle, in rotating
order. All processes except the one being measured are paused, so the device is in the same state
for each process.
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
from saved import LEAST_RELEASED
from serve import Worker
from workloads import GIB, MANY, MIB

WORKLOADS = ("kv", "discarded", "many")

Times = dict[str, dict[str, list[float]]]  # by child, by "pause_ms" and "resume_ms"


class Tensors:
    """The workloads' tensors in a library's regions."""

    def __init__(self, library: Library, counted: bool) -> None:
        self.pause, self.resume = library.pause, library.resume
        self._library = library
        self._counted = counted  # whether the library counts allocations
        self._tensors: dict[str, list[Any]] = {}
        self._addresses: dict[str, list[int]] = {}

    def setup(self, workload: str, kv_gib: int) -> int:
        """Create the tensors, and return their total size in bytes."""
        before = self._segments()
        with self._library.region(workload):
            tensors = self._allocate(workload, kv_gib)
        if workload == "many":
            made = [s for address, s in self._segments().items() if address not in before]
            if made != [2 * MIB] * MANY:
                raise RuntimeError(
                    f"torch made {len(made)} allocations of {sorted(set(made))} bytes, not {MANY} "
                    "of 2 MiB: this version of torch divides memory differently"
                )
            if self._counted:
                self._check_count(workload)
        self._tensors[workload] = tensors
        self._addresses[workload] = [tensor.data_ptr() for tensor in tensors]
        self.use(workload)
        return sum(tensor.nbytes for tensor in tensors)

    def use(self, workload: str) -> None:
        """Write to all of the memory."""
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
        # torch allocates 2 MiB for tensors of up to 1 MiB. For tensors of up to 10 MiB it allocates
        # 20 MiB and divides that itself, so 10,000 tensors of 2 MiB would be 1,000 allocations. Two
        # tensors of 1 MiB fill a segment of 2 MiB, so 20,000 of them are 10,000 allocations of
        # 2 MiB, in either library. `setup` counts the allocations.
        return workloads.blocks(2 * MANY, MIB)

    @staticmethod
    def _segments() -> dict[int, int]:
        """Return the addresses and sizes of torch's memory segments outside its default pool."""
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
    """Bare driver calls for the same number of bytes."""

    def __init__(self) -> None:
        self._driver = RawDriver()
        self.pause, self.resume, self.use = (
            self._driver.pause,
            self._driver.resume,
            self._driver.use,
        )

    def setup(self, workload: str, kv_gib: int) -> int:
        """Map the workload's bytes, and return their number."""
        total = {
            "kv": kv_gib * GIB,
            "discarded": workloads.decoder_bytes(),
            "many": MANY * 2 * MIB,
        }
        return self._driver.setup(workload, total[workload])


class Discarding(Worker):
    """A worker that measures pauses and resumes without a backup."""

    def __init__(self, name: str, kv_gib: int) -> None:
        workloads.start_cuda()
        self._kv_gib = kv_gib
        self._memory = Bare() if name == LIMIT else Tensors(open_library(name), name == OURS)

    def setup(self, workload: str) -> dict[str, Any]:
        """Create the workload's memory, which stays mapped."""
        size = self._memory.setup(workload, self._kv_gib)
        workloads.synchronise()
        workloads.stop_collecting()
        return {"bytes": size}

    def pause(self, workload: str) -> dict[str, Any]:
        """Pause a mapped workload."""
        before = workloads.free_bytes()
        milliseconds = workloads.timed_ms(lambda: self._memory.pause(workload))
        return {"pause_ms": milliseconds, "freed": workloads.free_bytes() - before}

    def resume(self, workload: str) -> dict[str, Any]:
        """Resume a paused workload, and use its memory."""
        milliseconds = workloads.timed_ms(lambda: self._memory.resume(workload))
        self._memory.use(workload)
        workloads.synchronise()
        return {"resume_ms": milliseconds}

    def at_once(self, workload: str) -> dict[str, Any]:
        """Pause a mapped workload, and immediately resume it."""
        paused = workloads.timed_ms(lambda: self._memory.pause(workload))
        resumed = workloads.timed_ms(lambda: self._memory.resume(workload))
        self._memory.use(workload)
        workloads.synchronise()
        return {"pause_ms": paused, "resume_ms": resumed}


def take_turns(
    children: Sequence[Child], workload: str, cycles: int, gap: float, rounds: int = 1
) -> tuple[Times, Times]:
    """Return each child's durations, with and without a wait before each resume.

    With the wait, the children take turns cycle by cycle. Without the wait, the children take turns
    in `rounds` rounds. At the end, the memory of all children is paused.
    """
    spaced: Times = {child.name: {"pause_ms": [], "resume_ms": []} for child in children}
    at_once: Times = {child.name: {"pause_ms": [], "resume_ms": []} for child in children}

    sizes: dict[str, int] = {}

    def pause(child: Child) -> None:
        reply = child.ask("pause", workload=workload)
        freed, size = reply["freed"], sizes[child.name]
        if freed < LEAST_RELEASED * size:
            raise Failed(f"{child.name} released {freed} of {size} bytes of {workload}")
        spaced[child.name]["pause_ms"].append(reply["pause_ms"])
        time.sleep(gap)

    for child in children:
        sizes[child.name] = child.ask("setup", workload=workload)["bytes"]
        pause(child)
    for cycle in range(cycles):
        for child in rotated(children, cycle):
            reply = child.ask("resume", workload=workload)
            spaced[child.name]["resume_ms"].append(reply["resume_ms"])
            pause(child)
    for turn in range(rounds):
        for child in rotated(children, turn):
            child.ask("resume", workload=workload)
            for _ in range(turn, cycles, rounds):
                reply = child.ask("at_once", workload=workload)
                for key, values in at_once[child.name].items():
                    values.append(reply[key])
            child.ask("pause", workload=workload)
            time.sleep(gap)
    return spaced, at_once


def rotated(children: Sequence[Child], turn: int) -> list[Child]:
    """Return the children in the order of a turn; each is first in every len(children)th turn."""
    first = turn % len(children)
    return [*children[first:], *children[:first]]


def label(workload: str, kv_gib: int) -> str:
    """Return the part of a metric's name that identifies the workload."""
    return {"kv": f"kv_{kv_gib}GiB", "discarded": "discarded_16GB", "many": "many_10k"}[workload]


def rows(name: str, times: Times, suffix: str) -> Iterator[dict[str, Any]]:
    """Yield the rows that compare pause and resume with each peer."""
    for key in ("pause_ms", "resume_ms"):
        metric = f"{name}_{key.removesuffix('_ms')}{suffix}_ms"
        values = {child: found[key] for child, found in times.items()}
        yield from comparison.compared(metric, values, values[LIMIT])
        if not set(PEERS) & set(values):
            comparison.show(metric, values[OURS])
            comparison.show(f"{metric}, {LIMIT}", values[LIMIT])


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows for the selected workloads."""
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
