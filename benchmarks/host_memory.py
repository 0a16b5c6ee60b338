"""Measure host memory in use, and touch host memory before a measurement.

    python host_memory.py BYTES     touches BYTES bytes, prints the seconds, and exits

A virtual machine might receive its memory only when a process first accesses it, at 2 to 3 GB/s.
Without this touch, the first measured library would appear slower than the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MIB = 1 << 20
GIB = 1 << 30

PASSES = 4  # the maximum number of passes, each in its own process
FAST = 8e9  # bytes per second if the machine already has the memory, with several CPUs
FAST_CPU = 1.5e9  # the same for each CPU, if there are few CPUs


def meminfo() -> dict[str, int]:
    """Return the values of /proc/meminfo in bytes."""
    return _kilobytes(Path("/proc/meminfo").read_text())


def in_use() -> dict[str, int]:
    """Return the bytes of host memory that this process and the machine use, by name.

    Depending on the driver, pinned memory is included in the process's values or only in the
    machine's value. Values that this system does not report are omitted.
    """
    found = {}
    for key, path, name in (
        ("resident", "/proc/self/status", "VmRSS"),
        ("anonymous", "/proc/self/smaps_rollup", "Pss_Anon"),
    ):
        with contextlib.suppress(OSError, KeyError):
            found[key] = _kilobytes(Path(path).read_text())[name]
    system = meminfo()
    found["machine"] = system["MemTotal"] - system["MemAvailable"]
    return found


def growth(before: dict[str, int], after: dict[str, int]) -> tuple[int, int]:
    """Return the bytes that the process and the machine allocated between two readings of `in_use`.

    For the process, the result is the largest growth of any of its values. The machine's value
    includes memory that other processes use.
    """
    grown = {key: after[key] - before[key] for key in before if key in after}
    machine = grown.pop("machine")
    return max(grown.values(), default=machine), machine


def _kilobytes(text: str) -> dict[str, int]:
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found


def touch(total: int) -> float:
    """Allocate `total` bytes and write to all of them with all CPUs; return the time in seconds."""
    cpus = len(os.sched_getaffinity(0))
    area = mmap.mmap(-1, total)
    with contextlib.suppress(OSError, AttributeError):
        area.madvise(mmap.MADV_HUGEPAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    piece = 64 * MIB

    def write(at: int) -> None:
        ctypes.memset(start + at, 1, min(piece, total - at))  # without the GIL

    begin = time.perf_counter()
    with ThreadPoolExecutor(cpus) as threads:
        list(threads.map(write, range(0, total, piece)))
    return time.perf_counter() - begin


def touch_elsewhere(total: int) -> str:
    """Touch `total` bytes in child processes until the rate is high. Return a summary.

    Each process exits and releases its memory to the operating system.
    """
    total = min(total, int(0.8 * meminfo()["MemAvailable"])) // MIB * MIB
    fast = min(FAST, FAST_CPU * len(os.sched_getaffinity(0)))
    seconds: list[float] = []
    while len(seconds) < PASSES and (not seconds or total / seconds[-1] < fast):
        done = subprocess.run(
            [sys.executable, __file__, str(total)], stdout=subprocess.PIPE, text=True
        )
        if done.returncode != 0:
            return f"touching {total / GIB:.1f} GiB of host memory failed: {done.returncode}"
        seconds.append(max(float(done.stdout), 1e-9))
    passes = ", ".join(f"{value:.1f}" for value in seconds)
    return f"touched {total / GIB:.1f} GiB of host memory, in seconds: {passes}"


if __name__ == "__main__":
    print(touch(int(sys.argv[1])), flush=True)
    os._exit(0)  # ctypes still refers to the mapping
