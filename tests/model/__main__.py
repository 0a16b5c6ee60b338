"""Runs the model test: `make model`.

    make model ARGS="--operations 1000000"   run more operations
    make model ARGS="--only 1234"            repeat the round with this seed

The program runs four processes at a time, each with its own seeds, until `--operations` operations
are done. Without `--seed`, the program chooses and prints a new seed. If the library differs from
the model, the program prints the calls that led to the difference and exits with 1.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import reliability
from faults.lanes import Workplace
from repository import ROOT

from model.worker import SEQUENCES

SEEDS = 1000  # the distance between the first seeds of two processes
# Operations per process; the last round may exceed it. A limit is needed because each stream that
# the driver refused to destroy keeps a simulator thread, which slows down later operations.
SHARE = 10_000
PATIENCE = 1800.0  # the time limit of a process, in seconds


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="model", description="Random calls against a model.")
    parser.add_argument(
        "--operations", type=int, default=100_000, help="the total number of operations"
    )
    parser.add_argument(
        "--seed", type=int, help="the seed of the first round, from which the other seeds follow"
    )
    parser.add_argument(
        "--only", type=int, metavar="SEED", help="run only the round with this seed"
    )
    parser.add_argument(
        "--shareable", default="", help="with --only: the tags that are shareable before the round"
    )
    parser.add_argument(
        "--sequences", type=int, default=SEQUENCES, help="number of sequences in a round"
    )
    # Four on two cores, because a process waits for a third of its time.
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument(
        "--write", action="store_true", help="write the figures to reliability.json"
    )
    return parser.parse_args()


def work(
    place: Workplace, seed: int, operations: int, sequences: int, folder: Path, shareable: str
) -> dict[str, object] | None:
    """Run a process; return its counts, or print a violation and return None."""
    folder.mkdir()
    command = [sys.executable, "-m", "model.worker"]
    command += [str(seed), str(operations), str(sequences), str(folder), *shareable]
    status: object
    with (folder / "said").open("wb") as said:
        try:
            status = subprocess.run(
                command,
                env=place.environment,
                cwd=ROOT,
                stdout=said,
                stderr=said,
                timeout=PATIENCE,
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"none: it was stopped after {PATIENCE:.0f} s"
    if status == 0:
        return dict(json.loads((folder / "figures").read_text()))
    print((folder / "said").read_text(errors="replace"))
    if not (folder / "figures").exists():
        print(f"status {status}, in {(folder / 'journal').read_text(errors='replace')}")
    return None


def main() -> int:
    asked = arguments()
    seed = asked.only if asked.only is not None else asked.seed
    if seed is None:
        seed = int.from_bytes(os.urandom(3), "little")
    operations = 1 if asked.only is not None else asked.operations
    workers = 1 if asked.only is not None else asked.workers
    began = time.monotonic()
    count = -(-operations // SHARE)
    with tempfile.TemporaryDirectory(prefix="memsaver-model-") as name:
        place = Workplace(Path(name))

        def one(i: int) -> dict[str, object] | None:
            share = -(-operations // count)
            folder = Path(name) / str(i)
            return work(place, seed + i * SEEDS, share, asked.sequences, folder, asked.shareable)

        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            found = list(pool.map(one, range(count)))
    seconds = round(time.monotonic() - began, 1)
    figures = [each for each in found if each is not None]
    total: dict[str, int] = {
        name: sum(int(str(each[name])) for each in figures)
        for name in (
            "operations",
            "sequences",
            "faults_met",
            "unchanged_pauses",
            "rounds_cut_short",
        )
    }
    counted: dict[str, collections.Counter[str]] = {}
    for name in ("by_operation", "errors"):
        counted[name] = collections.Counter()
        for each in figures:
            counted[name].update(each[name])  # type: ignore[call-overload]
    failed = count - len(figures)
    if asked.write:
        reliability.record(
            "model",
            {
                **total,
                **{name: dict(sorted(counts.items())) for name, counts in counted.items()},
                "failed": failed,
                "seed": seed,
                "seconds": seconds,
            },
        )
    print(
        f"{total['operations']} operations in {total['sequences']} sequences, "
        f"{total['faults_met']} met a fault; seed {seed}, {seconds} s"
    )
    print("all is as the model says" if not failed else f"{failed} of {count} processes failed")
    return 1 if failed or not figures else 0


if __name__ == "__main__":
    sys.exit(main())
