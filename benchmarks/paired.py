"""Compare an earlier build of memsaver with the current one, alternating on one GPU.

    pip install --no-build-isolation --no-deps --target /tmp/before SOURCE_OF_AN_EARLIER_COMMIT
    python benchmarks/paired.py --before /tmp/before --before-commit HASH [--after /tmp/after]

Because the machine's speed varies between runs by more than the differences of interest, the builds
alternate cycle by cycle in one run. The build that is measured first also alternates. Each build
runs in its own processes, with its folder on PYTHONPATH. The programs of this source tree measure
both builds. This program writes the rows, using the build that it imports.

Measurements (pause_resume.py describes them)
    kv, discarded, many     without a backup; bare driver calls alternate with both builds
    backed                  with a backup in host memory; a plain copy precedes each pause and
                            resume of changed contents, in both builds
    swap                    16 GB with backups, and --swap-gib GiB without

Device memory: --kv-gib (kv), 32 GiB (backed), 34 GiB (swap with backups), twice --swap-gib (swap
without), and the CUDA contexts of three processes, or of twice --processes (backed). Host memory:
32 GiB (backed), 64 GiB (swap with backups).

Rows have the bench "paired", the current build's values as `memsaver`, and "memsaver at HASH" as
the peer. A ratio above 1 means that the current build is faster. The values are trimmed means, and
the `detail` contains the ratio's standard error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import host_memory
import results
import runs
from children import Failed
from parts import paired
from parts.discarded import WORKLOADS

OUTPUT = results.DEFAULT_PATH.with_name("paired.json")

PARTS: dict[str, runs.Measure] = {
    **dict.fromkeys(WORKLOADS, paired.discarded),
    "backed": paired.backed,
    "swap": paired.swap,
}
IN_HOST_MEMORY = ("backed", "swap")


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = found.add_argument
    add("--before", type=Path, required=True, help="the folder of the earlier build")
    add("--before-commit", required=True, help="the earlier build's commit")
    add("--after", type=Path, help="the folder of the current build; default: the installed one")
    add("--only", type=runs.part_names(PARTS), default=list(PARTS), help=",".join(PARTS))
    add("--kv-gib", type=runs.at_least(1), default=64, help="GiB of the kv workload")
    add("--swap-gib", type=runs.at_least(1), default=32, help="GiB of each tag without a backup")
    add("--cycles", type=runs.at_least(1), default=60, help="cycles of each kind without a backup")
    add("--gap", type=float, default=0.5, help="seconds to wait before a resume without a backup")
    add(
        "--processes",
        type=runs.at_least(1),
        default=3,
        help="processes of each build; not for swap",
    )
    add("--backed-cycles", type=runs.at_least(1), default=6, help="cycles with a backup")
    add("--touch-gib", type=float, default=40, help="GiB of host memory to write to first; 0: none")
    add("--output", type=Path, default=OUTPUT)
    return found


def main() -> int:
    """Check both builds, and run the selected measurements."""
    options = parser().parse_args()
    try:
        paired.check(options)
    except Failed as error:
        print(error, file=sys.stderr)
        return 2
    if options.touch_gib and set(options.only) & set(IN_HOST_MEMORY):
        print(host_memory.touch_elsewhere(int(options.touch_gib * host_memory.GIB)), flush=True)
    return runs.run(dict.fromkeys(PARTS[name] for name in PARTS if name in options.only), options)


if __name__ == "__main__":
    sys.exit(main())
