"""Measure two builds of memsaver alternately, for the parts of benchmarks/paired.py.

Both builds run the workers of discarded.py, backed.py and swap.py, each build in its own processes
with its folder on PYTHONPATH. The build that is measured first alternates from cycle to cycle. The
cycles are divided among several sets of processes. This is needed because the speed of a copy
depends on the location of a process's pinned memory, and the duration of a driver call depends on
the location of the process's device memory.

A driver call without a copy has one of two durations, which differ by up to a factor of two. The
duration changes from cycle to cycle, so a few cycles would determine a median, and a single cycle
that the machine interrupts would distort a mean. The rows therefore contain trimmed means.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import results
from children import Child, Failed, attempt
from libraries import OURS
from raw_driver import LIMIT
from serve import Worker

from parts.backed import CHANGES
from parts.discarded import WORKLOADS, label, rotated, take_turns

BEFORE, AFTER = "before", "after"
BUILDS = (BEFORE, AFTER)

BENCH = "paired"
SWAPPING_PAIRS = 2  # pairs of processes for swaps with backups
MOST_SWAPS = 10  # maximum number of swaps of each kind without a backup

PLAIN = {"pause": "plain_out", "resume": "plain_in"}  # the copies that precede each call

TRIMMED = 0.2  # the fraction of the values at each end that a trimmed mean excludes

Values = dict[str, list[float]]  # by child


class Imported(Worker):
    """A worker that reports memsaver's location and imports the modules of all workers."""

    imports: ClassVar[tuple[str, ...]] = ()

    def __init__(self, name: str) -> None:
        pass

    def where(self) -> dict[str, Any]:
        """Return the path of memsaver's package, with its native module loaded."""
        from memsaver import _C

        return {"folder": str(Path(_C.__file__).resolve().parent)}


def start(worker: str, name: str, options: argparse.Namespace, **settings: Any) -> Child:
    """Start a child for a build, or for LIMIT, which runs with the current build."""
    folder = options.before if name == BEFORE else options.after
    environment = dict(os.environ)
    if folder is not None:
        others = [path for path in [environment.get("PYTHONPATH")] if path]
        environment["PYTHONPATH"] = os.pathsep.join([str(folder.resolve()), *others])
    library = LIMIT if name == LIMIT else OURS
    return Child(worker, library, label=name, environment=environment, **settings)


def check(options: argparse.Namespace) -> None:
    """Raise Failed unless each build's children import memsaver from the build's folder."""
    found = {}
    for name, folder in ((BEFORE, options.before), (AFTER, options.after)):
        with start("parts.paired:Imported", name, options) as child:
            found[name] = Path(child.ask("where")["folder"])
        if folder is not None and found[name].parent != folder.resolve():
            raise Failed(
                f"{name}: memsaver is imported from {found[name].parent}, not from {folder}: "
                f"install it with pip install --no-build-isolation --no-deps --target {folder}"
            )
    if found[BEFORE] == found[AFTER]:
        raise Failed(f"both builds are imported from {found[AFTER]}: set --before or --after")


def rows(
    options: argparse.Namespace,
    metric: str,
    found: Mapping[str, Sequence[float]],
    limit: Sequence[float] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the row for a metric, if both builds have values.

    The row's values are trimmed means. Its `detail` also contains the standard error of their
    ratio, as a fraction of the ratio.
    """
    before, after = found[BEFORE], found[AFTER]
    if not before or not after:
        return
    peer = f"memsaver at {options.before_commit[:7]}"
    row = results.measurement(metric, after, peer, before, limit, bench=BENCH, average=trimmed_mean)
    row["detail"] |= {
        "average": "trimmed mean",
        "standard_error": round(math.hypot(relative_error(before), relative_error(after)), 4),
    }
    yield row


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean of the values, excluding the lowest fifth and the highest fifth."""
    cut = int(TRIMMED * len(values))
    return statistics.mean(sorted(values)[cut : len(values) - cut])


def relative_error(values: Sequence[float]) -> float:
    """Return the relative standard error of the trimmed mean (Tukey and McLaughlin).

    The function treats all cycles as independent. The result can be too small, because the cycles
    of one process share the location of its memory. The error of a single value is 0.
    """
    if len(values) < 2:
        return 0.0
    ordered, cut = sorted(values), int(TRIMMED * len(values))
    low, high = ordered[cut], ordered[-1 - cut]
    spread = statistics.stdev(min(max(value, low), high) for value in values)
    return spread / ((1 - 2 * TRIMMED) * math.sqrt(len(values))) / trimmed_mean(values)


def discarded(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows for pauses and resumes without a backup; the limit is bare driver calls."""
    found: dict[str, Values] = {}  # by metric
    sets = min(options.processes, options.cycles)
    for at in range(sets):
        cycles = len(range(at, options.cycles, sets))
        with attempt(failures), contextlib.ExitStack() as stack:
            children = [
                stack.enter_context(
                    start("parts.discarded:Discarding", name, options, kv_gib=options.kv_gib)
                )
                for name in (*BUILDS, LIMIT)
            ]
            for child in children:
                child.ready()
            for workload in (name for name in WORKLOADS if name in options.only):
                with attempt(failures):
                    both = take_turns(children, workload, cycles, options.gap, cycles)
                    for times, suffix in zip(both, ("", "_at_once"), strict=True):
                        for call in ("pause", "resume"):
                            metric = f"{label(workload, options.kv_gib)}_{call}{suffix}_ms"
                            values = found.setdefault(metric, {name: [] for name in times})
                            for name, by_call in times.items():  # without the first pause
                                values[name] += by_call[f"{call}_ms"][-cycles:]
    for metric, values in found.items():
        yield from rows(options, metric, values, values[LIMIT])


def backed(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows for pauses and resumes with a backup; the limit is a plain pinned copy."""
    found: dict[str, Values] = {}  # by operation
    with contextlib.ExitStack() as stack:
        pairs = [
            [
                stack.enter_context(start("parts.backed:Backed", name, options))
                for name in (BUILDS if at % 2 == 0 else BUILDS[::-1])
            ]
            for at in range(options.processes)
        ]
        for child in (child for children in pairs for child in children):
            with attempt(failures):
                child.ready()
        for at, children in enumerate(pairs):
            with attempt(failures):
                cycles = range(at, options.backed_cycles, options.processes)
                for call, name, value in backed_times(children, cycles):
                    found.setdefault(call, {build: [] for build in BUILDS})[name].append(value)
            for child in children:
                child.close()
    for key, values in found.items():
        kind, _, call = key.partition("_")
        if call in PLAIN:
            plain = found.get(f"{kind}_{PLAIN[call]}")
            limit = plain and [*plain[BEFORE], *plain[AFTER]]
            metric = f"{key}_ms" if kind == "lora" else f"backed_{key}_ms"
            yield from rows(options, metric, values, limit)


def backed_times(children: Sequence[Child], cycles: range) -> Iterator[tuple[str, str, float]]:
    """Yield the operation, child and milliseconds of first pauses and of cycles of each kind."""
    for child in children:
        yield "first_pause", child.name, child.ask("first")["pause"]
    for child in children:
        child.ask("prepare_plain")
    for kind in CHANGES:
        for cycle in cycles:
            for child in rotated(children, cycle):
                reply = child.ask("cycle", kind=kind, plain=kind == "changed")
                for call, value in reply.items():
                    yield f"{kind}_{call}", child.name, value


def swap(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows for swaps with and without backups."""
    with attempt(failures):
        yield from backed_swaps(options)
    with attempt(failures):
        yield from discarding_swaps(options)


@contextlib.contextmanager
def pair(worker: str, options: argparse.Namespace, **settings: Any) -> Iterator[list[Child]]:
    """Start a child for each build, and set up the children one after the other."""
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(start(worker, name, options, **settings)) for name in BUILDS
        ]
        for child in children:
            child.ready()
        for child in children:
            child.ask("setup")
        yield children


def backed_swaps(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the row for swaps with backups; the limit is simultaneous plain copies both ways."""
    found: Values = {name: [] for name in BUILDS}
    plain: list[float] = []
    for at in range(SWAPPING_PAIRS):
        with pair("parts.swap:Backed", options) as children:
            for cycle in range(at, options.backed_cycles, SWAPPING_PAIRS):
                for child in rotated(children, cycle // SWAPPING_PAIRS):
                    reply = child.ask("turn", swap_first=True)
                    found[child.name].append(reply["swap"])
                    plain.append(reply["plain"])
    yield from rows(options, "swap_16GB_ms", found, plain)


def discarding_swaps(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows for swaps without backups, with and without waits between them."""
    with pair("parts.swap:Discarding", options, gib=options.swap_gib) as children:
        for suffix, gap in (("", 0.0), ("_spaced", options.gap)):
            found: Values = {name: [] for name in BUILDS}
            for cycle in range(min(options.cycles, MOST_SWAPS)):
                for child in rotated(children, cycle):
                    time.sleep(gap)
                    found[child.name].append(child.ask("swap")["swap"])
            yield from rows(options, f"swap_{options.swap_gib}GiB{suffix}_ms", found)
