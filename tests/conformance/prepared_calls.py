"""The expected behavior of the calls in questions.calls, and the preparation of these calls."""

from __future__ import annotations

import pytest
from questions.calls import CALLS, NEEDS, finish

WAITS = {"cuMemFree of 512 B", "cuMemFree of 4 MiB", "cuMemFreeHost", "cuMemHostUnregister"}
# Nothing relies on whether these wait, nor on what a capture does to a thread in the default mode.
NOT_ASSERTED = {"cuModuleLoadData", "cuModuleGetFunction", "cuModuleUnload"}


def ready_call(drv, name):
    """Prepare a call; return the call and the function that cleans up after it."""
    make = CALLS[name]
    if make in NEEDS and not drv.has(NEEDS[make]):
        pytest.skip(f"the driver does not have {NEEDS[make]}")
    steps = make(drv)
    call = next(steps)
    return call, lambda code: finish(call, steps, code)
