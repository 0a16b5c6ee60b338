"""Calls that all ranks of a test make, and the ranks' shared setup.

The module does not import torch.
"""

from __future__ import annotations

import time

from memsaver.distributed import GroupError


def gathered(value, group=None):
    """Return the values from all ranks."""
    import torch.distributed as dist

    everyones = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, value, group=group)
    return everyones


def lost(call, *arguments, **named):
    """Return the `GroupError` that a call raises, with the call's duration in `took`."""
    start = time.monotonic()
    try:
        call(*arguments, **named)
    except GroupError as error:
        error.took = time.monotonic() - start
        return error
    raise AssertionError("the group was not lost")
