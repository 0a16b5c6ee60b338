"""Tests resumes and allocations on a device without enough memory."""

from __future__ import annotations

import os
import sys

import torch
from expected_errors import raises

import memsaver
from torch_cases.tensors import (
    GIB,
    MIB,
    NOISE,
    allocated,
    free,
    held,
    inside,
    is_numbered,
    numbered,
    tidy,
)


def case_resume_without_enough_memory(tag: str) -> None:
    """A resume that does not fit reports the required and the free bytes, and can be retried."""
    size = 4 * GIB
    with memsaver.region(tag, backup="host"):
        first, second = numbered(2048, 1), numbered(2048, 2)
    memsaver.pause(tag)
    ballast = torch.empty(free() - 3 * GIB, dtype=torch.uint8, device="cuda")
    before = free()
    for _ in range(2):
        with raises(memsaver.OutOfDeviceMemoryError) as errors:
            memsaver.resume(tag)
        error = errors[0]
        assert error.needed >= size, error.needed
        assert error.free < size, error.free
        assert abs(error.free - before) <= 64 * MIB, (error.free, before)
        assert error.tag == tag and error.status == "OUT_OF_DEVICE_MEMORY"
        assert "CUDA out of memory" in str(error)
        assert memsaver.state(tag) == "paused"
        assert held(tag) == 0
        assert abs(free() - before) <= NOISE
    del ballast, errors, error
    tidy()
    memsaver.resume(tag)
    assert is_numbered(first, 1)
    assert is_numbered(second, 2)


def case_allocation_without_enough_memory(tag: str) -> None:
    """After torch's own out-of-memory error, the region remains usable."""
    with memsaver.region(tag):
        with raises(torch.OutOfMemoryError):
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
        tensor = numbered(4)
    assert inside(tensor, tag)
    assert allocated(tag) <= 20 * MIB
    with memsaver.paused(tag, backup="host"):
        pass
    assert is_numbered(tensor)


def case_shortage_says_who_holds_memory(tag: str) -> None:
    """The error names the owners of the memory and the tags that could be paused."""
    other = tag + ".other"
    with memsaver.region(tag, backup="none"):
        tensor = torch.ones(GIB, dtype=torch.uint8, device="cuda")
    with memsaver.region(other, backup="none"):
        idle = torch.ones(512 * MIB, dtype=torch.uint8, device="cuda")
    memsaver.pause(tag)
    with memsaver.disabled():
        hog = torch.empty(free() - 512 * MIB, dtype=torch.uint8, device="cuda")
    with raises(memsaver.OutOfDeviceMemoryError) as errors:
        memsaver.resume(tag)
    error = errors[0]
    assert error.device == 0 and error.tag == tag
    assert error.needed >= GIB > error.free > 0
    (holder,) = [holder for holder in error.holders if holder.tag == other]
    assert holder.bytes >= 512 * MIB and holder.pausable and holder.state == "mapped"
    assert tag not in [holder.tag for holder in error.holders]
    assert repr(other) in str(error).split("These can be paused now: ")[1]
    assert os.getpid() not in [process.pid for process in error.processes]
    del hog
    tidy()
    memsaver.resume(tag)
    assert not tensor.any() and bool(idle.all())


def case_shortage_in_a_region(tag: str) -> None:
    """memsaver adds a note about the tags to torch's out-of-memory error."""
    with memsaver.region(tag + ".held"):
        kept = numbered(64)
    wanted = 2 * torch.cuda.mem_get_info()[1]
    with raises(torch.OutOfMemoryError) as errors:
        with memsaver.region(tag):
            torch.empty(wanted, dtype=torch.uint8, device="cuda")
    if sys.version_info >= (3, 11):
        (note,) = errors[0].__notes__
        assert f"{tag + '.held'!r} 64 MiB" in note and "These can be paused now" in note
    errors.clear()
    assert is_numbered(kept)
