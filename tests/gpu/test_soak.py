"""Runs random cycles for ten minutes in two processes that compete for a GPU's memory.

    python -m pytest -m "gpu and soak" tests/gpu/test_soak.py

After each step, the test checks contents by fingerprint. At the end, the test compares the
resources that each process uses with those at the start. The results are written to a JSON file,
under "soak". Settings:

    SOAK_SECONDS    the duration of the cycles, 600 by default
    SOAK_SEED       the seed of the steps, 1 by default
    SOAK_GIB        the device memory that each process may use, by default 60 % of the free memory
    SOAK_UNDER      a command to run the processes under, such as
                    "compute-sanitizer --error-exitcode 9 --report-api-errors no --show-backtrace
                    no" (its backtraces include Python's frames and were seen to keep deleted
                    tensors alive). The tool is slow, so use a short run and a small SOAK_GIB.
    RELIABILITY     the JSON file, build/reliability.json by default
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
import reliability
from soak import race

SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
GIB = float(os.environ["SOAK_GIB"]) if "SOAK_GIB" in os.environ else None
UNDER = shlex.split(os.environ.get("SOAK_UNDER", ""))
RELIABILITY = Path(os.environ.get("RELIABILITY", "build/reliability.json"))
PATIENCE = 900 if UNDER else 300


@pytest.mark.gpu
@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 4 * PATIENCE)
def test_two_processes_compete_for_the_memory() -> None:
    found = race.run("gpu", SECONDS, SEED, gib=GIB, under=UNDER, patience=PATIENCE)
    found["under"] = UNDER
    reliability.record("soak under a tool" if UNDER else "soak", found, RELIABILITY)
    print(found)
    race.check(found)
    met = found["errors_met"]
    short = {"OutOfDeviceMemoryError", "OutOfMemoryError"}  # memsaver's and torch's
    assert GIB or short & met.keys(), "there was no competition for memory"
