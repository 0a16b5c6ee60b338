"""Runs the random walks: `make walks`.

    make walks ARGS="--seconds 600"               each of them for ten minutes
    make walks ARGS="--only disk --seed 1234"     one of them, from a seed

Each walk is a module of this folder with `walk(seed, seconds)`. This function runs for about
`seconds` seconds, raises an AssertionError if memsaver breaks a promise, and returns its counts.
Each walk runs in a separate process. If a walk hangs, its process prints the stacks of all threads
and exits. Without `--seed`, each run chooses and prints new seeds. The program exits with 1 if a
walk fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from repository import IMPORT_PATH, ROOT

WALKS = ("threads", "disk", "ranks")
# The most seconds that a walk may run after its time, for waits in progress and its last checks.
GRACE_SECONDS = 120.0

CHILD = """
import faulthandler, importlib, json, sys
name, seed, seconds, limit = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
faulthandler.enable()
faulthandler.dump_traceback_later(limit, exit=True)
figures = importlib.import_module("walks." + name).walk(seed, seconds)
print(json.dumps(figures))
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="walks", description="Random walks.")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="duration of each walk in seconds"
    )
    parser.add_argument(
        "--seed", type=int, help="the seed of the first walk, from which the other seeds follow"
    )
    parser.add_argument("--only", choices=WALKS, help="run only this walk")
    return parser.parse_args()


def run(name: str, seed: int, seconds: float, folder: Path) -> bool:
    """Run one walk in a separate process and print its counts; return whether it passed."""
    limit = seconds + GRACE_SECONDS
    command = [sys.executable, "-c", CHILD, name, str(seed), str(seconds), str(limit)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MEMSAVER_")}
    environment |= {
        "PYTHONPATH": IMPORT_PATH,
        "MEMSAVER_DRIVER": "sim",
        "MEMSAVER_SIM_DEVICES": "2",
        "MEMSAVER_DISK_DIR": str(folder),
    }
    began = time.monotonic()
    try:
        child = subprocess.run(
            command,
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit + 30,
        )
        status, out, err = str(child.returncode), child.stdout, child.stderr
    except subprocess.TimeoutExpired as late:
        status = "none: ended after the limit"
        out, err = (
            each.decode(errors="replace") if isinstance(each, bytes) else each or ""
            for each in (late.stdout, late.stderr)
        )
    took = time.monotonic() - began
    if status == "0":
        print(f"{name}: seed {seed}, {took:.1f} s, {json.loads(out.splitlines()[-1])}", flush=True)
        return True
    print(f"{name}: seed {seed} failed with status {status}\n{out}{err}", flush=True)
    return False


def main() -> int:
    asked = arguments()
    seed = asked.seed if asked.seed is not None else int.from_bytes(os.urandom(3), "little")
    names = [asked.only] if asked.only else list(WALKS)
    failed = 0
    for i, name in enumerate(names):
        with tempfile.TemporaryDirectory(prefix="memsaver-walk-") as folder:
            failed += not run(name, seed + i, asked.seconds, Path(folder))
    print(f"{len(names) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
