"""Measure the fingerprint kernel's read rate, and a device copy in the same run for comparison.

    python benchmarks/fingerprint_rate.py [--gb 16] [--cycles 15] [--output FILE]

The kernel and the copy alternate, and both use random bytes in one torch tensor. The reported time
is the duration of the whole Python call, which waits for the device and reads the results. The rate
of a fingerprint counts only the bytes that the kernel reads. The time of a copy is measured on the
GPU. The rate of a copy counts both the bytes read and the bytes written. The first fingerprint and
the first copy are not counted, because the first call loads the kernel and pins host memory that
later calls reuse.

Prints a JSON row and merges it into --output, if given (see results.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import results
import torch

from memsaver._runtime.native import _C

PEER = "device copy (torch)"


def seconds_of_fingerprints(tensor: torch.Tensor) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    _C.fingerprint([(tensor.data_ptr(), tensor.nbytes)])
    return time.perf_counter() - start


def seconds_of_copy(target: torch.Tensor, source: torch.Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    target.copy_(source)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def measure(nbytes: int, cycles: int) -> results.Row:
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    rates: dict[str, list[float]] = {"memsaver": [], "peer": []}
    for cycle in range(cycles + 1):
        read = nbytes / seconds_of_fingerprints(source) / 1e9
        copied = 2 * nbytes / seconds_of_copy(target, source) / 1e9
        if cycle > 0:
            rates["memsaver"].append(round(read, 1))
            rates["peer"].append(round(copied, 1))
    mine, theirs = (statistics.median(rates[who]) for who in ("memsaver", "peer"))
    detail: dict[str, Any] = {"bytes": nbytes, "GBps": rates}
    return {
        "bench": "fingerprint",
        "metric": "fingerprint_rate_GBps",
        "memsaver": mine,
        "peer": PEER,
        "peer_value": theirs,
        "ratio": results.ratio(mine, theirs, higher_is_better=True),
        "limit": None,
        "detail": detail,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gb", type=float, default=16.0, help="size of the memory in GB")
    parser.add_argument("--cycles", type=int, default=15)
    parser.add_argument("--output", type=Path, help="the JSON file into which the row is merged")
    arguments = parser.parse_args()
    row = measure(int(arguments.gb * 1e9), arguments.cycles)
    circumstances = results.stamp()
    print(json.dumps({**row, **circumstances}))
    if arguments.output:
        results.write(arguments.output, [row], circumstances)


if __name__ == "__main__":
    main()
