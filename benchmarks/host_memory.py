"""Host memory: how much of it is in use, and touching it before anything is measured.

    python host_memory.py BYTES     touches so many bytes and ends; prints the seconds it took

A virtual machine may get its memory only when it is first touched, by whichever process, at 2 to
3 GB/s, once. A library would be charged for that by the accident of going first.
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

PASSES = 4  # at most, each a process of its own
FAST = 8e9  # bytes a second: memory that the machine already has, with several CPUs
FAST_CPU = 1.5e9  # with few, for each


def meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    return _kilobytes(Path("/proc/meminfo").read_text())


def in_use() -> dict[str, int]:
    """Bytes of host memory: resident in this process; of those anonymous; and of the machine.

    Pinned memory may be in the first two or only in the last, as the driver made it. A figure that
    this system does not have is left out.
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
    """Bytes taken between two readings of `in_use`: by the process, and on the machine.

    The process's are those of the figure that grew most; on the machine others count too.
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
    """Takes so many bytes in this process, writes to all of them with all CPUs; the seconds."""
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
    """Lets processes touch so many bytes, or what there is, until that is fast; what happened.

    Each ends and gives its memory back to the system, which keeps it.
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
    os._exit(0)  # the mapping is in use by an address that ctypes holds
