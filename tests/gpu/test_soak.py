"""Ten minutes of random cycles in two processes that compete for a GPU's memory.

    python -m pytest -m "gpu and soak" tests/gpu/test_soak.py

Contents are checked by fingerprint after each step; what a process holds at the end is compared
with what it held at the start. The figures go into a JSON file, under "soak". Settings:

    SOAK_SECONDS    of walking, 600 by default
    SOAK_SEED       of the steps, 1 by default
    SOAK_GIB        device memory a process may use; by default both want 60 % of what is free
    SOAK_UNDER      a command to run the processes under, such as
                    "compute-sanitizer --error-exitcode 9 --report-api-errors no --show-backtrace
                    no" (with backtraces, which are of Python too, deleted tensors were seen to
                    stay); it is slow, so for a short run with a small SOAK_GIB
    RELIABILITY     the file, build/reliability.json by default
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
