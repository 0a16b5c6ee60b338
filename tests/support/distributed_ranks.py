"""Groups of processes on simulated devices, for tests of `memsaver.distributed`.

The same processes run many scenarios. All memory is mapped at the start and at the end of each
scenario, and every rank checks its own state.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

import rank_processes

# Code that every rank runs first.
PRELUDE = """
import contextlib, datetime, gc, os, signal, sys, time, warnings
import memsaver
import memsaver.distributed as md
from simulated_driver import Block, Simulator
from rank_calls import gathered, lost

import torch.distributed as dist

sim = Simulator()
MIB = 1 << 20
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
warnings.simplefilter("error")

def begin(backend, **named):
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=30), **named)

def blocks(tag, sizes, backup=None):
    with memsaver.region(tag, backup=backup):
        return [Block(sim, nbytes, 100 * RANK + i + 1) for i, nbytes in enumerate(sizes)]

def states(*tags):
    return [str(memsaver.state(tag)) for tag in tags]

def intact(several):
    return all(block.is_intact() for block in several)

def held(*tags):
    return sum(row.resident_bytes for row in memsaver.stats().tags if row.tag in tags)

def refused(call, *arguments, **named):
    # The error, which must be the same on all ranks.
    try:
        call(*arguments, **named)
    except md.RankError as error:
        same = gathered((str(error), error.failures, error.stuck, error.tag, error.status))
        assert all(other == same[0] for other in same), same
        return error
    raise AssertionError("no rank failed")

def raises(kind, call, *arguments, **named):
    try:
        call(*arguments, **named)
    except kind as error:
        return error
    raise AssertionError(f"{call} did not raise {kind}")

def fault(call, *, on, times=0, code=1):
    # Fails the call for as long as the block lasts, on one rank.
    return sim.fault(call, code, 1, times) if RANK == on else contextlib.nullcontext()

@contextlib.contextmanager
def registered(register, function, *, on):
    registration = register(function) if RANK == on else None
    try:
        yield
    finally:
        if registration:
            registration.remove()

@contextlib.contextmanager
def full(on):
    # On one rank another process holds the rest of the device's memory.
    free, _ = memsaver.device_memory(0)
    if RANK == on:
        sim.occupy(free)
    try:
        yield
    finally:
        sim.occupy(0)
"""


def run(
    folder: Path,
    code: str,
    size: int,
    statuses: Mapping[int, int] | None = None,
    timeout: float = 60,
) -> None:
    """Run code in one process per rank of a group.

    Every process must end with status 0, except the ranks in `statuses`, for example `{2: 7}`.
    """
    text = PRELUDE + textwrap.dedent(code) + "\nassert sim.violations() == []\n"
    rank_processes.run(text, size, folder, statuses=statuses, timeout=timeout)
