"""A process of the model test, which runs rounds of sequences until it has done enough operations.

    python -m model.worker seed operations sequences folder [shareable tags]

The process records its operations in `folder/journal`, which survives a crash, and writes its
counts to `folder/figures`. If the library differs from the model, the process prints the violation
and the command that repeats it, and exits with 1.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import FlakyStrategyDefinition
from hypothesis.stateful import run_state_machine_as_test

import memsaver
from memsaver._memory.sharing import sending
from memsaver.errors import MemsaverWarning, UsageWarning
from model.place import NAMES

STEPS = 60  # the maximum number of operations in a sequence
SEQUENCES = 5  # in a round, which has one seed and can be repeated alone


def run_round(
    machine: type, seed: int, sequences: int = SEQUENCES, *, shrinks: bool = True
) -> None:
    """Run one round. Raises a violation whose notes contain the shrunken sequence."""

    class Round(machine):  # type: ignore[misc]
        pass

    run_state_machine_as_test(
        hypothesis.seed(seed)(Round),
        settings=settings(
            max_examples=sequences,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            print_blob=False,
            report_multiple_bugs=False,
            phases=[Phase.generate, *([Phase.shrink] if shrinks else [])],
            suppress_health_check=list(HealthCheck),
        ),
    )


def prepare(folder: Path):
    """Prepare the process; return its state machine, which is ready to run, and its state."""
    from model.apparatus import Process
    from model.journal import Journal
    from model.machine import Machine

    folders = []
    for name in ("disk-0", "disk-1"):
        (folder / name).mkdir(exist_ok=True)
        folders.append(str(folder / name))
    os.environ["MEMSAVER_DISK_DIR"] = folders[0]
    process = Process(Journal(folder / "journal"), folders)

    def showwarning(message, category, *_rest, **_named) -> None:
        process.warned.append(str(message))

    warnings.simplefilter("always", MemsaverWarning)
    warnings.simplefilter("ignore", DeprecationWarning)  # tested on purpose
    # Regions choose backups at random, so many withdraw one: see tests/memory/test_choices.py.
    warnings.filterwarnings("ignore", ".*withdraws the backup", UsageWarning)
    warnings.showwarning = showwarning
    Machine.process = process
    Machine.digests = {}
    return Machine, process


def main() -> int:
    seed, operations, sequences = map(int, sys.argv[1:4])
    folder = Path(sys.argv[4])
    faulthandler.enable()
    machine, process = prepare(folder)
    for tag in sys.argv[5:]:
        with memsaver.region(tag, shareable=True):
            pass
    gc.freeze()  # a collection of the modules would cost as much as some operations
    start, status = time.monotonic(), 0
    while process.done.total() < operations:
        shareable = "".join(filter(sending.is_shareable, NAMES))
        try:
            run_round(machine, seed, sequences)
        except BaseException as error:
            if isinstance(error, FlakyStrategyDefinition) and not process.journal.has_failed:
                # A fault may affect either of two threads' calls, and the possible next operations
                # depend on it, so Hypothesis cannot replay the sequence. The round ends.
                process.cut_short += 1
                seed += 1
                continue
            print("".join(traceback.format_exception(error)))
            if sys.version_info < (3, 11):
                print("\n".join(getattr(error, "__notes__", ())))
            alone = f"--only {seed} --sequences {sequences}"
            alone += f" --shareable {shareable}" if shareable else ""
            print(f'  alone: make model ARGS="{alone}"', flush=True)
            status = 1
            break
        seed += 1
    figures = {
        "operations": process.done.total(),
        "sequences": process.sequences,
        "faults_met": process.met,
        "rounds_cut_short": process.cut_short,
        "unchanged_pauses": process.unchanged,
        "by_operation": dict(process.done),
        "errors": dict(process.failed),
        "seconds": time.monotonic() - start,
    }
    (folder / "figures").write_text(json.dumps(figures))
    return status


if __name__ == "__main__":
    sys.exit(main())
