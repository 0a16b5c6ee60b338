"""Calls that all ranks of a test make, and their shared setup. Loads no torch."""

from __future__ import annotations

import time

from memsaver.distributed import GroupError


def gathered(value, group=None):
    """Return the values of all ranks."""
    import torch.distributed as dist

    everyones = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, value, group=group)
    return everyones


def lost(call, *arguments, **named):
    """Return a call's `GroupError`, with its duration as `took`."""
    start = time.monotonic()
    try:
        call(*arguments, **named)
    except GroupError as error:
        error.took = time.monotonic() - start
        return error
    raise AssertionError("the group was not lost")
