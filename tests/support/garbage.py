"""Garbage collection in processes that run many tests."""

import gc

MANY_OBJECTS = 5_000  # more than a test creates, fewer than a library such as torch


def collect_garbage() -> None:
    """Collect garbage.

    Objects of newly imported libraries become permanent, so later collections skip these objects.
    """
    gc.collect()
    if len(gc.get_objects()) > MANY_OBJECTS:
        gc.freeze()
