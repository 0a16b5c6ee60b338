"""Measure host memory in excess of the backed-up bytes, while paused and after a resume.

Each library runs in its own process. Each value is the growth of host memory, in MiB, relative to
the time before the first pause. The first value is measured while 16 GB are paused, and excludes
these 16 GB. The second value is measured after a resume and, with memsaver, after trim(wait=True).
The process's values are used if they include the backup. Otherwise, the machine's values are used,
because memory that the driver pinned might be included only in them. The metrics host_machine_* are
always the machine's values. These metrics include page tables, memory that the driver retains,
and the memory of other processes.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import comparison
import host_memory
import workloads
from children import Child, attempt
from libraries import DEFAULT, OURS, PEERS, open_library
from saved import Saved
from serve import Worker
from workloads import MIB

CYCLES = 3
SLOW_CYCLES = 1


class Host(Worker):
    """A worker that measures its own host memory before, during and after a pause."""

    def __init__(self, name: str) -> None:
        workloads.start_cuda()
        self._library = open_library(name)

    def setup(self) -> dict[str, Any]:
        """Create the tensors, and load all kernels that a cycle uses."""
        self._saved = Saved(self._library, "weights", "host", workloads.decoder)
        self._saved.change()
        self._saved.remember()
        self._saved.check()
        self._before = host_memory.in_use()
        return {"bytes": self._saved.bytes}

    def cycle(self) -> dict[str, Any]:
        """Pause, resume and trim; return the growth of host memory since `setup`, in MiB.

        During the pause, the value excludes the bytes of the contents. After the trim, the value
        includes all remaining memory.
        """
        self._saved.change()
        self._saved.pause()
        paused = host_memory.in_use()
        self._saved.resume()
        self._library.trim()
        trimmed = host_memory.in_use()
        process, machine = host_memory.growth(self._before, paused)
        left, machine_left = host_memory.growth(self._before, trimmed)
        if process < self._saved.bytes / 2:  # the process's values do not include the backup
            process, left = machine, machine_left
        return {
            "host_overhead_paused_MiB": in_mib(process - self._saved.bytes),
            "host_overhead_trimmed_MiB": in_mib(left),
            "host_machine_paused_MiB": in_mib(machine - self._saved.bytes),
            "host_machine_trimmed_MiB": in_mib(machine_left),
        }


def in_mib(size: int) -> float:
    """Convert bytes to MiB, rounded."""
    return round(size / MIB, 1)


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows for host_*."""
    found: dict[str, dict[str, list[float]]] = {}
    with contextlib.ExitStack() as stack:
        names = [OURS, *(PEERS if options.peer else ())]
        children = [stack.enter_context(Child("parts.host:Host", name)) for name in names]
        for child in children:
            with attempt(failures):
                child.ready()  # later imports would change the machine's values
        for child in children:
            with child, attempt(failures):
                child.ask("setup")
                for _ in range(SLOW_CYCLES if child.name == DEFAULT else CYCLES):
                    for metric, value in child.ask("cycle").items():
                        found.setdefault(metric, {}).setdefault(child.name, []).append(value)
    for metric, values in found.items():
        yield from comparison.compared(metric, values)
        if OURS in values and not set(PEERS) & set(values):
            comparison.show(metric, values[OURS])
