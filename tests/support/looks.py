"""Short queries for the state of a test's tags and blocks."""

from __future__ import annotations

import contextlib
import threading

import memsaver


def row_of(name, device=0):
    """Return a tag's row of the statistics on one device."""
    return next(row for row in memsaver.stats()[name] if row.device == device)


def addresses(blocks):
    return [block.address for block in blocks]


def intact(blocks):
    return all(block.is_intact() for block in blocks)


def paused_tags():
    """Return the names of the process's paused tags."""
    return {row.tag for row in memsaver.stats().tags if row.state == "paused"}


@contextlib.contextmanager
def held(sim):
    """Prevent copies from starting in the block. Ends before a failing test frees its blocks."""
    sim.hold_streams(True)
    try:
        yield
    finally:
        sim.hold_streams(False)


@contextlib.contextmanager
def held_memory(sim, address, nbytes):
    """Prevent copies of this memory, and those queued after them, from starting in the block."""
    sim.hold_memory(address, nbytes)
    try:
        yield
    finally:
        sim.hold_memory(0, 0)


def released_soon(sim):
    """Let held copies start a moment later, from another thread."""

    def release():
        sim.hold_streams(False)
        sim.hold_memory(0, 0)

    timer = threading.Timer(0.2, release)
    timer.start()
    return timer
