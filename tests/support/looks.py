"""Short queries for the state of a test's tags and blocks, and holds that delay copies."""

from __future__ import annotations

import contextlib
import threading

import memsaver


def row_of(name, device=0):
    """Return a tag's row in the statistics of one device."""
    return next(row for row in memsaver.stats()[name] if row.device == device)


def addresses(blocks):
    return [block.address for block in blocks]


def intact(blocks):
    return all(block.is_intact() for block in blocks)


def paused_tags():
    """Return the names of this process's paused tags."""
    return {row.tag for row in memsaver.stats().tags if row.state == "paused"}


HOLD_SECONDS = 60.0


@contextlib.contextmanager
def _until_the_end(release):
    """Call `release` at the end of the block. Fail after HOLD_SECONDS.

    A wait for delayed copies cannot be interrupted, so the wait would outlast a test's timeout.
    """
    is_late = threading.Event()

    def end():
        is_late.set()
        release()

    timer = threading.Timer(HOLD_SECONDS, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        release()
    assert not is_late.is_set(), f"the block did not end in {HOLD_SECONDS} s: it waited for copies"


@contextlib.contextmanager
def held(sim):
    """Prevent copies from starting within the block.

    The hold ends before a failing test frees its blocks.
    """
    sim.hold_streams(True)
    with _until_the_end(lambda: sim.hold_streams(False)):
        yield


@contextlib.contextmanager
def held_memory(sim, address, nbytes):
    """Prevent copies of this memory, and copies queued after them, from starting in the block."""
    sim.hold_memory(address, nbytes)
    with _until_the_end(lambda: sim.hold_memory(0, 0)):
        yield


@contextlib.contextmanager
def released_soon(sim):
    """Release all holds from another thread, 0.2 s after the start of the block.

    Yields an event that is set before the release.
    """
    released = threading.Event()

    def release():
        released.set()
        sim.hold_streams(False)
        sim.hold_memory(0, 0)

    timer = threading.Timer(0.2, release)
    timer.start()
    try:
        yield released
    finally:
        timer.join()
