"""Measure the cost per allocation for 1,000 and 100,000 allocations on the simulated driver.

    python benchmarks/limits.py [--large 100000] [--output benchmarks/results/limits.json]

The results exclude the time inside driver calls, because this time belongs to the simulator. The
program builds a library that sits between memsaver and the simulator and measures the excluded
time. The remaining time is memsaver's own. The program reports its minimum over several rounds, in
nanoseconds per allocation. `growth` is the ratio of the large tag's time to the small tag's time.
Lookups are called from Python, which adds about 100 ns. Lookups in mixed order jump across the
tag's memory, so the growth mainly shows how long the CPU waits for memory outside its caches.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SMALL, SIZE, ROUNDS = 1_000, 512, 7

FORWARDER = """
typedef unsigned long word;
static word (*real_{0})(word, word, word, word, word, word, word, word, word, word, word);
word {0}(word a, word b, word c, word d, word e, word f, word g, word h, word i, word j, word k) {{
  const double start = now();
  const word result = real_{0}(a, b, c, d, e, f, g, h, i, j, k);
  inside += now() - start;
  return result;
}}
"""


def timing_driver(simulator: Path, folder: str) -> str:
    """Build a driver that forwards all calls to the simulator and times them; return its path."""
    listed = subprocess.run(["nm", "-D", str(simulator)], capture_output=True, text=True).stdout
    names = re.findall(r" T (cu\w+)", listed)
    lines = ["#define _GNU_SOURCE", "#include <dlfcn.h>", "#include <time.h>"]
    lines += ["static __thread double inside;"]
    lines += ["double seconds_inside(void) { return inside; }"]
    lines += ["static double now(void) {", "struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t);"]
    lines += ["return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec; }"]
    lines += [FORWARDER.format(name) for name in names]
    lines += ["__attribute__((constructor)) static void start(void) {"]
    lines += [f'  void* const library = dlopen("{simulator}", RTLD_NOW);']
    lines += [f'  *(void**)&real_{name} = dlsym(library, "{name}");' for name in names] + ["}"]
    source, library = Path(folder, "timing.c"), Path(folder, "timing.so")
    source.write_text("\n".join(lines))
    compiler = shutil.which("cc") or shutil.which("gcc") or sys.exit("a C compiler is needed")
    command = [compiler, "-O2", "-fPIC", "-shared", str(source), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True)
    return str(library)


class Steps:
    """The minimum of memsaver's own nanoseconds per allocation over all rounds."""

    def __init__(self, inside: ctypes.CDLL) -> None:
        self.inside = inside.seconds_inside
        self.inside.restype = ctypes.c_double
        self.ns: dict[str, float] = {}

    @contextmanager
    def step(self, name: str, count: int) -> Iterator[None]:
        """Measure the time of the block, which handles `count` allocations."""
        driver, start = self.inside(), time.perf_counter()
        yield
        seconds = time.perf_counter() - start - (self.inside() - driver)
        self.ns[name] = min(1e9 * seconds / count, self.ns.get(name, float("inf")))


def measure(steps: Steps, count: int, backup: str, holes: bool) -> dict[str, float]:
    """Measure the operations on one tag, from its first allocation to its last free."""
    import memsaver
    from memsaver._runtime.native import _C, backup_code

    for turn in range(ROUNDS if count <= SMALL else 3):
        name = f"{count} {backup} {holes} {turn}"
        _C.region_enter(name, backup_code(backup))  # a region would look for torch's allocator
        with steps.step("allocate", count * (1 + holes)):
            addresses = [_C.malloc(SIZE) for _ in range(count * (1 + holes))]
        _C.region_exit()
        if holes:
            for address in addresses[1::2]:
                _C.free(address)
            addresses = addresses[::2]
        mixed = random.Random(turn).sample(addresses, count)
        for seed in range(1, 4):
            for address in addresses:
                ctypes.c_ubyte.from_address(address).value = seed
            with steps.step("pause", count):
                _C.begin([name], [], -1, []).run()
            if backup == "host":
                for order, which in (("in order", addresses), ("mixed", mixed)):
                    with steps.step(f"look at a backup, {order}", count):
                        for address in which:
                            _C.backup_view(address, SIZE)
            with steps.step("resume", count):
                _C.begin([], [name], -1, []).run()
        with steps.step("whose is it, mixed", count):
            for address in mixed:
                _C.owns(address)
        first, rest = addresses[: count // 2], set(addresses[count // 2 :])
        with steps.step("free, in order", len(first)):
            for address in first:
                _C.free(address)
        mixed = [address for address in mixed if address in rest]
        with steps.step("free, mixed", len(mixed)):
            for address in mixed:
                _C.free(address)
        memsaver.trim(wait=True)
    return steps.ns


def main() -> None:
    """Measure, print the rows, and write them to --output if it is given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--large", type=int, default=100_000, help="number of allocations in the large tag"
    )
    parser.add_argument("--output", type=Path, help="the JSON file to write")
    arguments = parser.parse_args()
    os.environ["MEMSAVER_DRIVER"] = "sim"
    from memsaver._runtime.native import LIBRARY_DIR

    with tempfile.TemporaryDirectory() as folder:
        os.environ["MEMSAVER_DRIVER"] = timing_driver(LIBRARY_DIR / "libmemsaver_sim.so", folder)
        inside = ctypes.CDLL(os.environ["MEMSAVER_DRIVER"])
        import memsaver

        rows = []
        for backup in ("none", "host"):
            for holes in (False, True):
                measure(Steps(inside), SMALL, backup, holes)  # warm up
                small = measure(Steps(inside), SMALL, backup, holes)
                large = measure(Steps(inside), arguments.large, backup, holes)
                for step in small:
                    row = {"backup": backup, "holes": holes, "step": step}
                    row |= {"small_ns": round(small[step], 1), "large_ns": round(large[step], 1)}
                    rows.append(row | {"growth": round(large[step] / small[step], 2)})
                    print(*rows[-1].values(), sep="\t", flush=True)
    if arguments.output:
        result = {
            "memsaver": memsaver.__version__,
            "machine": platform.machine(),
            "small": SMALL,
            "large": arguments.large,
            "allocation_bytes": SIZE,
            "rows": rows,
        }
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
