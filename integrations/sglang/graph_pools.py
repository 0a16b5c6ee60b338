"""Passes SGLang the id of the torch pool that a pausable graph is captured into.

SGLang creates an id for the pool of its graphs and finds the pool by this id. Symmetric memory is
allocated outside the pool during a capture, and borrowing (SGLANG_ENABLE_GRAPH_POOL_BORROW) uses
the pool's free blocks between replays. A pausable graph is captured into one of memsaver's pools,
so SGLang must use that pool's id instead.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

__all__ = ["named"]

_CAPTURE = "sglang.srt.distributed.device_communicators.pynccl_allocator"
_SHARED = "sglang.srt.model_executor.runner_utils.pool"


@contextlib.contextmanager
def named(pool: tuple[int, int]) -> Iterator[None]:
    """Make SGLang capture into `pool` during the block, and borrow from `pool` after the block."""
    capture = sys.modules.get(_CAPTURE)
    if capture is None or not hasattr(capture, "set_graph_pool_id"):
        yield
        return
    before = getattr(capture, "_graph_pool_id", None)
    capture.set_graph_pool_id(pool)
    try:
        yield
    finally:
        capture.set_graph_pool_id(before)
    shared = sys.modules.get(_SHARED)
    borrows = getattr(shared, "graph_pool_borrow_enabled", None)
    # Without borrowing, SGLang captures graphs that are not pausable into its own pool.
    if shared is not None and borrows is not None and borrows():
        shared.set_global_graph_memory_pool(pool)
