"""Tests tensors that are deleted before a pause, during a pause, or by other threads."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import torch

import memsaver
from torch_cases.tensors import (
    MIB,
    NOISE,
    allocated,
    free,
    held,
    inside,
    is_numbered,
    numbered,
    on_thread,
    tidy,
)


def case_deleted_tensors_go_back(tag: str) -> None:
    """empty_cache() releases deleted tensors' memory before and after a pause; the tag still
    exists.
    """
    # Tensors larger than share_bytes do not share pieces after a resume.
    with memsaver.region(tag, backup="host"):
        tensors = [numbered(768, number) for number in range(4)]
    before, held_before = free(), held(tag)
    assert held_before >= 4 * 768 * MIB
    del tensors[1]
    assert free() - before >= 768 * MIB - NOISE
    assert held_before - held(tag) >= 768 * MIB
    assert [is_numbered(t, n) for t, n in zip(tensors, (0, 2, 3), strict=True)] == [True] * 3

    memsaver.pause(tag)
    memsaver.resume(tag)
    before, held_before = free(), held(tag)
    del tensors[0]
    assert free() - before >= 768 * MIB - NOISE
    assert held_before - held(tag) == 768 * MIB
    assert [is_numbered(t, n) for t, n in zip(tensors, (2, 3), strict=True)] == [True] * 2

    tensors.clear()
    tidy()
    assert held(tag) == 0
    assert memsaver.stats()[tag][0].allocations == 0
    with memsaver.region(tag):
        again = numbered(8)
    assert inside(again, tag)
    assert memsaver.stats()[tag][0].backup == "host"  # the tag kept its policy
    memsaver.pause(tag)
    memsaver.resume(tag)
    assert is_numbered(again)


def case_small_tensors_go_back(tag: str) -> None:
    """Deleted small tensors are released after a resume if share_bytes excludes small tensors."""
    memsaver.configure(share_bytes="2MiB")
    try:
        with memsaver.region(tag, backup="host"):
            tensors: list[Any] = [numbered(32, number) for number in range(8)]
        memsaver.pause(tag)
        memsaver.resume(tag)
        before = held(tag)
        for number in (1, 4, 7):
            tensors[number] = None
        tidy()
        assert before - held(tag) == 3 * 32 * MIB
        assert all(is_numbered(t, n) for n, t in enumerate(tensors) if t is not None)
    finally:
        memsaver.configure(share_bytes="512MiB")


def case_dead_blocks_are_not_copied(tag: str) -> None:
    """Neither temporary memory from loading nor memory of deleted tensors is saved or restored."""
    with memsaver.region(tag, backup="host"):
        peak = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
        tensors: list[Any] = [numbered(2, number) for number in range(40)]
        del peak
    for number in range(0, 40, 2):
        tensors[number] = None
    live = 20 * 2 * MIB
    # torch allocates these tensors from 20 MiB segments, each of which has live and dead blocks.
    assert allocated(tag) >= 2 * live
    report = memsaver.pause(tag)
    assert report.copied_bytes == live, (report.copied_bytes, live)
    assert report.bytes >= 2 * live
    rows = memsaver.stats()[tag]
    assert sum(row.backup_bytes for row in rows) == live
    report = memsaver.resume(tag)
    assert report.copied_bytes == live
    assert all(is_numbered(t, n) for n, t in enumerate(tensors) if t is not None)


def case_freed_on_another_thread(tag: str) -> None:
    """A tensor can be created on one thread and deleted on another."""
    made: list[Any] = []

    def make() -> None:
        with memsaver.region(tag, backup="host"):
            made.extend(numbered(64, number) for number in range(3))

    on_thread(make)
    before = held(tag)
    on_thread(made.pop)
    tidy()
    assert before - held(tag) == 64 * MIB
    made.pop(0)
    tidy()
    assert before - held(tag) == 128 * MIB
    assert is_numbered(made[0], 1)


def case_freed_inside_another_region(tag: str) -> None:
    """A tensor deleted within another tag's region or disabled() is freed from its own tag."""
    other = tag + ".other"
    with memsaver.region(tag):
        tensors = [numbered(64, number) for number in range(3)]
    with memsaver.region(other):
        kept = numbered(64, 9)
        tensors.pop()
    with memsaver.disabled():
        tensors.pop()
    tidy()
    assert allocated(tag) == 64 * MIB
    assert allocated(other) == 64 * MIB
    assert is_numbered(tensors[0], 0)
    assert is_numbered(kept, 9)


def case_freed_while_paused(tag: str) -> None:
    """A resume does not map a tensor that was deleted while its tag was paused."""
    with memsaver.region(tag, backup="host"):
        tensors = [numbered(640, number) for number in range(3)]
    before = free()
    paused = memsaver.pause(tag)
    assert paused.bytes >= 3 * 640 * MIB
    tensors.pop(1)
    tidy()
    assert allocated(tag) == 2 * 640 * MIB
    on_thread(lambda: tensors.pop(0))
    tidy()
    assert allocated(tag) == 640 * MIB
    resumed = memsaver.resume(tag)
    assert resumed.bytes == 640 * MIB
    assert resumed.copied_bytes == 640 * MIB
    assert held(tag) == 640 * MIB
    assert is_numbered(tensors[0], 2)
    assert free() - before >= 2 * 640 * MIB - 64 * MIB  # pinned memory uses some on the device


def case_everything_freed_while_paused(tag: str) -> None:
    """A tag is usable after all its tensors were deleted while it was paused."""
    with memsaver.region(tag, backup="host"):
        tensor = numbered(64)
    memsaver.pause(tag)
    del tensor
    tidy()
    assert allocated(tag) == 0
    assert memsaver.resume(tag).bytes == 0
    with memsaver.region(tag):
        tensor = numbered(64, 5)
    assert is_numbered(tensor, 5)


def case_mostly_dead_blocks(tag: str) -> None:
    """A pause of blocks that are mostly free emits one warning."""
    with memsaver.region(tag, backup="host"):
        peak = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
        tensor = numbered(64)
        del peak
    gc.collect()
    for turn in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            memsaver.pause(tag)
        found = [w for w in caught if issubclass(w.category, memsaver.PerformanceWarning)]
        assert len(found) == (1 if turn == 0 else 0), [str(w.message) for w in caught]
        memsaver.resume(tag)
    assert is_numbered(tensor)
