"""The model test as a command: `make model`, or `python -m model` in tests/.

    make model ARGS="--operations 1000000"   more of it
    make model ARGS="--only 1234"            one round again, by its seed

Two processes, each with seeds of its own, go on until so many operations are done in all. Without
`--seed` the seeds are new ones each time; they are printed. Exits with 1 when something does not
hold, and says with which calls.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from faults.__main__ import ROOT, commit
from faults.lanes import Workplace
from soak.race import record

from model.worker import SEQUENCES

RESULTS = ROOT / "benchmarks" / "results" / "reliability.json"
SEEDS = 1_000_000  # between the first seeds of two processes
PATIENCE = 3600.0  # seconds for all of it, and one more for each hundred operations


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="model", description="Random calls against a model.")
    parser.add_argument("--operations", type=int, default=100_000, help="how many, in all")
    parser.add_argument("--seed", type=int, help="of the first round; the others follow from it")
    parser.add_argument("--only", type=int, metavar="SEED", help="one round alone")
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="of one round")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", action="store_true", help=f"put the figures into {RESULTS.name}")
    return parser.parse_args()


def start(
    place: Workplace, seed: int, operations: int, sequences: int, folder: Path
) -> subprocess.Popen[bytes]:
    folder.mkdir()
    command = [sys.executable, "-m", "model.worker"]
    command += [str(seed), str(operations), str(sequences), str(folder)]
    with (folder / "said").open("wb") as said:
        return subprocess.Popen(command, env=place.environment, cwd=ROOT, stdout=said, stderr=said)


def finish(worker: subprocess.Popen[bytes], folder: Path, limit: float) -> dict[str, object] | None:
    """Its figures, or None where something does not hold, and that printed."""
    try:
        status: object = worker.wait(limit)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()
        status = f"none: it was stopped after {limit:.0f} s"
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
    with tempfile.TemporaryDirectory(prefix="memsaver-model-") as name:
        place = Workplace(Path(name))
        folders = [Path(name) / str(i) for i in range(workers)]
        share = -(-operations // workers)
        started = [
            start(place, seed + i * SEEDS, share, asked.sequences, each)
            for i, each in enumerate(folders)
        ]
        limit = PATIENCE + operations / 100
        found = [finish(*pair, limit) for pair in zip(started, folders, strict=True)]
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
    failed = workers - len(figures)
    if asked.write:
        record(
            RESULTS,
            "model",
            {
                **total,
                **{name: dict(sorted(counts.items())) for name, counts in counted.items()},
                "failed": failed,
                "seed": seed,
                "seconds": seconds,
                "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "commit": commit(),
                "machine": {"cpus": len(os.sched_getaffinity(0))},
            },
        )
    print(
        f"{total['operations']} operations in {total['sequences']} sequences, "
        f"{total['faults_met']} met a fault; seed {seed}, {seconds} s"
    )
    print("all is as the model says" if not failed else f"{failed} of {workers} processes failed")
    return 1 if failed or not figures else 0


if __name__ == "__main__":
    sys.exit(main())
