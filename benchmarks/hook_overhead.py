"""Measure the overhead that the hooks add to a cudaMalloc/cudaFree pair outside any region.

In one preloaded process, pairs of calls through the hooks alternate with pairs of direct calls to
the runtime every few milliseconds. Two processes would differ by more than the overhead, because
their libraries and contexts have different addresses. Several processes are measured one after the
other. For each size, the program prints a JSON row with the median nanoseconds per pair over all
turns.

    python benchmarks/hook_overhead.py [--processes 5] [--turns 60]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memsaver._memory.preload import preload_env

SIZES = {"512B": 512, "1MiB": 1 << 20, "2MiB": 2 << 20}
TURN_SECONDS = 0.005

# Argument: the path of the runtime, whose own functions are called by address, because their names
# resolve to the hooks. Reads "bytes pairs direct" lines and answers each with the nanoseconds of a
# pair. One allocation of every size stays alive, so that no pair releases a whole driver block.
PROGRAM = r"""
#include <dlfcn.h>

#include <chrono>
#include <cstddef>
#include <cstdio>

extern "C" int cudaMalloc(void** pointer, size_t bytes);
extern "C" int cudaFree(void* pointer);
extern "C" const char* cudaGetErrorString(int error);

using Malloc = int (*)(void**, size_t);
using Free = int (*)(void*);

static int check(int error) {
  if (error != 0) std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  return error;
}

int main(int, char** arguments) {
  void* runtime = dlopen(arguments[1], RTLD_NOW | RTLD_NOLOAD);
  if (!runtime) return 1;
  const Malloc mallocs[] = {cudaMalloc, reinterpret_cast<Malloc>(dlsym(runtime, "cudaMalloc"))};
  const Free frees[] = {cudaFree, reinterpret_cast<Free>(dlsym(runtime, "cudaFree"))};
  if (mallocs[0] == mallocs[1] || frees[0] == frees[1]) {
    std::fprintf(stderr, "the process is not preloaded\n");
    return 1;
  }
  size_t bytes, pairs;
  int direct;
  while (std::scanf("%zu %zu %d", &bytes, &pairs, &direct) == 3) {
    void* kept = nullptr;
    void* pointer = nullptr;
    if (check(cudaMalloc(&kept, bytes))) return 1;
    int failed = 0;
    const Malloc take = mallocs[direct];
    const Free give = frees[direct];
    const auto begin = std::chrono::steady_clock::now();
    for (size_t i = 0; i < pairs; ++i) {
      failed |= take(&pointer, bytes);
      failed |= give(pointer);
    }
    const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - begin;
    if (check(cudaFree(kept)) || failed) return 1;
    std::printf("%.3f\n", spent.count() / pairs);
    std::fflush(stdout);
  }
}
"""


def find_runtime() -> Path:
    """Return the path of torch's CUDA runtime or, if there is none, of a toolkit's runtime."""
    folders: list[Path] = []
    spec = importlib.util.find_spec("nvidia")
    if spec is not None:
        for location in spec.submodule_search_locations or ():
            folders += sorted(Path(location).glob("*/lib"), reverse=True)
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home:
            folders.append(Path(home, "lib64"))
    for folder in folders:
        for library in sorted(folder.glob("libcudart.so.*"), reverse=True):
            return library.resolve()
    raise RuntimeError("no libcudart.so.* found; install torch for CUDA, or set CUDA_HOME")


def build(folder: Path) -> Path:
    """Compile the program, and link it against the runtime in the same way as torch's own
    libraries.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        raise RuntimeError("no C++ compiler found; install g++ or set CXX")
    runtime = find_runtime()
    source, program = folder / "pairs.cpp", folder / "pairs"
    source.write_text(PROGRAM)
    command = [*compiler.split(), "-O2", str(source), "-o", str(program), str(runtime)]
    subprocess.run([*command, f"-Wl,-rpath,{runtime.parent}", "-ldl"], check=True)
    return program


class Process:
    """A running instance of the program, with memsaver preloaded."""

    def __init__(self, program: Path) -> None:
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        env = {name: value for name, value in env.items() if not name.startswith("MEMSAVER_")}
        self._child = subprocess.Popen(
            [str(program), str(find_runtime())],
            env={**env, **preload_env(env=env)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def pair_ns(self, size: int, pairs: int, direct: bool) -> float:
        """Return the mean nanoseconds per pair for `pairs` pairs, with or without the hooks."""
        assert self._child.stdin and self._child.stdout
        try:
            self._child.stdin.write(f"{size} {pairs} {int(direct)}\n")
            self._child.stdin.flush()
            answer = self._child.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError("the measured program failed; this needs an NVIDIA GPU")
        return float(answer)

    def close(self) -> None:
        """Stop the program and wait for it to exit."""
        self._child.communicate()


def measure(processes: int = 5, turns: int = 60) -> list[dict[str, Any]]:
    """Measure the hooks' overhead on the current GPU.

    Requires a build of memsaver, a compiler and a CUDA runtime. Raises RuntimeError if one of these
    requirements is missing.
    """
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in SIZES}
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for number in range(processes):
            process = Process(program)
            try:
                for name, size in SIZES.items():
                    process.pair_ns(size, 20, direct=True)
                    estimate = process.pair_ns(size, 100, direct=True)
                    pairs = max(20, int(TURN_SECONDS * 1e9 / estimate))
                    process.pair_ns(size, pairs, direct=False)
                    for turn in range(turns):
                        # The order alternates.
                        for direct in (False, True) if (turn + number) % 2 else (True, False):
                            times[name][direct].append(process.pair_ns(size, pairs, direct))
            finally:
                process.close()
    rows = []
    for name, (ours, theirs) in times.items():
        value, peer_value = statistics.median(ours), statistics.median(theirs)
        rows.append(
            {
                "bench": "hook_overhead",
                "metric": f"malloc_free_pair_{name}_ns",
                "memsaver": round(value, 1),
                "peer": "the runtime's own functions",
                "peer_value": round(peer_value, 1),
                "ratio": round(value / peer_value, 4),
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--processes", type=int, default=5, help="number of processes (default 5)")
    parser.add_argument(
        "--turns", type=int, default=60, help="number of turns for each size (default 60)"
    )
    options = parser.parse_args(arguments)
    try:
        rows = measure(options.processes, options.turns)
    except RuntimeError as error:
        sys.exit(f"hook_overhead: {error}")
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
