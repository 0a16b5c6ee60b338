"""A device without enough memory."""

from __future__ import annotations

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
    """Says what is needed and free, changes nothing, and succeeds when there is enough."""
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
        assert memsaver.state(tag) is memsaver.State.PAUSED
        assert held(tag) == 0
        assert abs(free() - before) <= NOISE
    del ballast, errors, error
    tidy()
    memsaver.resume(tag)
    assert is_numbered(first, 1)
    assert is_numbered(second, 2)


def case_allocation_without_enough_memory(tag: str) -> None:
    """torch raises its own error, the region goes on working."""
    with memsaver.region(tag):
        with raises(torch.OutOfMemoryError):
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
        tensor = numbered(4)
    assert inside(tensor, tag)
    assert allocated(tag) <= 20 * MIB
    with memsaver.paused(tag, backup="host"):
        pass
    assert is_numbered(tensor)
