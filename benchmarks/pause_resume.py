"""Measure pause, resume and swap with memsaver and torch_memory_saver on the same tensors.

    PYTHONPATH=/parent/of/torch_memory_saver python benchmarks/pause_resume.py [--only kv,many]

Measurements
    kv          64 tensors of 1 GiB in one tag, no backup
    discarded   the 195 weight tensors of an 8-billion-parameter decoder, 16 GB, no backup
    many        10,000 allocations of 2 MiB in one tag, no backup
    backed      the decoder with a backup in host memory: the first pause of a process; later
                cycles with all, none, and 1 % (lora) of the tensors changed
    swap        a pause of one tag and a resume of another: 16 GB each with a backup, and 64 GiB
                each without a backup
    disk        8 GB with a backup on disk (--disk-dir)
    host        host memory in excess of the backed-up bytes, while paused and after trim
    two_gpu     the decoder on each of two GPUs, with a backup; omitted with one GPU
    neighbour   the decoder on one of two GPUs, with a backup on the other GPU or on the host;
                omitted with one GPU
    sharing     16 GB sent to another process from a shareable region, or by CUDA IPC; an update
                of an engine's weights from a region, or through a bucket outside regions
    take_over   an engine that maps a trainer's pages, by bare driver calls, compared with a copy
    bandwidth   a kernel on a region's memory, compared with the same kernel on plain memory
    hook        a cudaMalloc/cudaFree pair outside any region, preloaded or not (hook_overhead.py)

Each library and setting runs in a separate process. For measurements without a backup, the limit is
a bare sequence of driver calls with handles of 1 GiB and one reservation, also in a separate
process. The processes take turns cycle by cycle, in rotating order. All processes except the one
being measured are paused, so the device is in the same state for each process. For measurements
with a backup, the limit is a plain copy of the same number of bytes between the device and 1 GiB of
pinned memory. All values are included, even warm-ups and outliers.

In measurements without a backup, a wait of --gap seconds before each resume represents work on the
GPU. The driver clears released memory during this wait, so the clearing is not measured. For
metrics whose names end in _at_once_ms, each resume follows its pause immediately. Swaps of tags
without a backup also follow each other immediately, except for the metric that ends in _spaced_ms,
for which each swap follows a wait of --gap seconds.

A virtual machine might receive its memory only when a process first accesses it, at 2 to 3 GB/s.
Therefore, before backups are measured, temporary processes repeatedly touch --touch-gib GiB of host
memory until the accesses are fast.

Memory with a backup is filled with random bits. In every cycle, the sum of each MiB before the
pause is compared with the sum after the resume. If a library loses bytes, its measurement fails and
produces no row.

Prints a table, and merges each row into --output as soon as it exists (see results.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import host_memory
import results
import runs
from parts import (
    backed,
    bandwidth,
    discarded,
    disk,
    hook,
    host,
    neighbour,
    sharing,
    swap,
    take_over,
    two_gpu,
)
from raw_driver import count_gpus

# The function that measures each part, in the order of measurement; a shared function is called
# once. The last part needs exclusive use of the device.
PARTS: dict[str, runs.Measure] = {
    **dict.fromkeys(discarded.WORKLOADS, discarded.measure),
    "backed": backed.measure,
    "swap": swap.measure,
    "disk": disk.measure,
    "host": host.measure,
    "two_gpu": two_gpu.measure,
    "neighbour": neighbour.measure,
    "sharing": sharing.measure,
    "take_over": take_over.measure,
    "bandwidth": bandwidth.measure,
    "hook": hook.measure,
}
WITH_PEER = (*discarded.WORKLOADS, "backed", "swap", "disk", "host")
IN_HOST_MEMORY = ("backed", "swap", "disk", "host", "two_gpu", "neighbour")
ON_TWO_GPUS = ("two_gpu", "neighbour")

DISK_DIR = Path("/var/tmp")  # /tmp may be in memory


def run(options: argparse.Namespace) -> int:
    """Run the selected measurements, and return an exit status."""
    compared = options.peer and set(options.only) & set(WITH_PEER)
    if compared and importlib.util.find_spec("torch_memory_saver") is None:
        print(
            "torch_memory_saver is not installed, so there is nothing to compare with: put its "
            "wheel (0.0.10), unpacked, into PYTHONPATH, or measure memsaver alone with --no-peer",
            file=sys.stderr,
        )
        return 2
    if options.touch_gib and set(options.only) & set(IN_HOST_MEMORY):
        print(host_memory.touch_elsewhere(int(options.touch_gib * host_memory.GIB)), flush=True)
    return runs.run(dict.fromkeys(PARTS[name] for name in PARTS if name in options.only), options)


def main() -> int:
    """Parse the command line, and run the selected measurements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--kv-gib", type=int, default=64, help="GiB of the kv workload and of a swap's tags")
    add("--cycles", type=int, default=15, help="number of cycles of each kind without a backup")
    add("--gap", type=float, default=0.5, help="seconds to wait before a resume without a backup")
    add("--processes", type=int, default=3, help="processes of each library, for the first pause")
    add("--backed-cycles", type=int, default=5, help="number of cycles of each kind with a backup")
    add("--disk-cycles", type=int, default=3, help="number of cycles with a backup on disk")
    add("--disk-dir", type=Path, default=DISK_DIR, help="a directory on the disk that is measured")
    add("--touch-gib", type=float, default=40, help="GiB of host memory to write to first; 0: none")
    add("--only", type=runs.part_names(PARTS), help=",".join(PARTS))
    add("--output", type=Path, default=results.DEFAULT_PATH)
    add("--peer", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    gpus = count_gpus()
    if options.only is None:
        options.only = [name for name in PARTS if name not in ON_TWO_GPUS or gpus > 1]
    for name in ON_TWO_GPUS:
        if name in options.only and gpus < 2:
            parser.error(f"{name} needs two GPUs, and there are {gpus}")
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
