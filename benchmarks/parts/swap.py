"""Measure swaps of two tags, with backups (compared with a pause and a resume) and without."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import comparison
import results
import workloads
from children import Child, attempt
from libraries import DEFAULT, OURS, PEERS, open_library
from saved import PlainCopy, Saved
from serve import Worker
from workloads import GIB

CALLS = "memsaver, pause then resume"
SPARE = GIB  # the tolerance for other changes of free device memory during a swap


class Backed(Worker):
    """Two tags of 16 GB with backups. Each tag was paused once before the first swap."""

    def __init__(self, name: str) -> None:
        workloads.start_cuda()
        self._library = open_library(name)

    def setup(self) -> dict[str, Any]:
        """Create the tags, one after the other."""
        self._out = Saved(self._library, "a", "host", workloads.decoder, seed=1)
        self._out.pause()
        self._here = Saved(self._library, "b", "host", workloads.decoder, seed=2)
        self._here.pause()
        self._here.resume()
        self._plain = PlainCopy(self._here.bytes)
        return {"bytes": self._here.bytes}

    def turn(self, swap_first: bool) -> dict[str, Any]:
        """Swap in one direction, pause and resume in the other; change all contents before each."""
        found = {"plain": self._plain.both_ms()}
        for kind in ("swap", "calls") if swap_first else ("calls", "swap"):
            found[kind] = self._move(kind == "swap")
        return found

    def _move(self, swap: bool) -> float:
        here, out, library = self._here, self._out, self._library
        here.change()
        here.remember()
        free = workloads.free_bytes()

        def calls() -> None:
            library.pause(here.tag)
            library.resume(out.tag)

        spent = workloads.timed_ms(lambda: library.swap(here.tag, out.tag) if swap else calls())
        check_free(free)
        out.check()
        self._here, self._out = out, here
        return spent


class Discarding(Worker):
    """Two tags of `gib` GiB without backups."""

    def __init__(self, name: str, gib: int) -> None:
        workloads.start_cuda()
        self._library = open_library(name)
        self._zeros = name == OURS  # whether memory without a backup must read as zero
        self._gib = gib

    def setup(self) -> dict[str, Any]:
        """Create the tags, one after the other."""
        self._tensors: dict[str, list[Any]] = {}
        self._addresses: dict[str, list[int]] = {}
        self._here, self._out = "b", "a"
        for tag in (self._out, self._here):
            with self._library.region(tag):
                self._tensors[tag] = workloads.blocks(self._gib, GIB)
            self._addresses[tag] = [tensor.data_ptr() for tensor in self._tensors[tag]]
            self._use(tag)
            if tag == self._out:
                self._library.pause(tag)
        workloads.stop_collecting()
        return {}

    def swap(self) -> dict[str, Any]:
        """Swap the tags, and return the duration in milliseconds."""
        here, out, free = self._here, self._out, workloads.free_bytes()
        spent = workloads.timed_ms(lambda: self._library.swap(here, out))
        check_free(free)
        if self._zeros and not workloads.all_zero(self._tensors[out]):
            raise RuntimeError(f"memory of {out} does not read as zero after a swap")
        self._use(out)
        self._here, self._out = out, here
        return {"swap": spent}

    def _use(self, tag: str) -> None:
        for tensor in self._tensors[tag]:
            tensor.fill_(1)
        workloads.synchronise()
        if [tensor.data_ptr() for tensor in self._tensors[tag]] != self._addresses[tag]:
            raise RuntimeError(f"an address of {tag} moved")


def check_free(before: int) -> None:
    """Raise an error if a swap left both tags mapped."""
    free = workloads.free_bytes()
    if free < before - SPARE:
        raise RuntimeError(f"{free} bytes are free after a swap, {before} were before it")


def backed(cycles: int) -> Iterator[dict[str, Any]]:
    """Yield the row for swaps of 16 GB with backups."""
    found: dict[str, list[float]] = {"swap": [], "calls": [], "plain": []}
    with Child("parts.swap:Backed", OURS) as child:
        child.ask("setup")
        for cycle in range(cycles):
            for key, value in child.ask("turn", swap_first=cycle % 2 == 0).items():
                found[key].append(value)
    yield results.measurement("swap_16GB_ms", found["swap"], CALLS, found["calls"], found["plain"])


def discarding(gib: int, cycles: int, gap: float, peer: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows for swaps without backups, immediately after each other and after waits."""
    at_once: dict[str, list[float]] = {}
    spaced: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(Child("parts.swap:Discarding", name, gib=gib))
            for name in (OURS, *([DEFAULT] if peer else ()))
        ]
        for child in children:
            child.ready()
        for child in children:
            with child:
                child.ask("setup")
                at_once[child.name] = [child.ask("swap")["swap"] for _ in range(cycles)]
                for _ in range(cycles):
                    time.sleep(gap)
                    spaced.setdefault(child.name, []).append(child.ask("swap")["swap"])
            time.sleep(gap)  # the driver clears the ended process's memory
    for metric, found in ((f"swap_{gib}GiB_ms", at_once), (f"swap_{gib}GiB_spaced_ms", spaced)):
        yield from comparison.compared(metric, found)
        if not set(PEERS) & set(found):
            comparison.show(metric, found[OURS])


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows for swap_*."""
    with attempt(failures):
        yield from backed(options.backed_cycles)
    with attempt(failures):
        yield from discarding(
            options.kv_gib, min(options.cycles, 10), options.gap, bool(options.peer)
        )
