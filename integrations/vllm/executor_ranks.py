"""The ranks of a worker's executor as a group."""

from __future__ import annotations

import sys
from typing import Any

from ..engine.ranks import Group

__all__ = ["group_of"]

_PARALLEL = "vllm.distributed.parallel_state"
_GROUP = "_memsaver_group"  # an attribute of a worker


def group_of(worker: Any) -> Group:
    """Return the ranks of the worker's executor. The first call is collective.

    If a model's experts are distributed over data-parallel engines, the world is larger than the
    executor. vLLM then has a process group for an executor only if the executor spans several
    hosts.
    """
    size = worker.parallel_config.world_size
    if size == 1:
        return Group(None)
    found: Group | None = getattr(worker, _GROUP, None)
    if found is None:
        found = Group(_cpu_group(worker, size))
        setattr(worker, _GROUP, found)
    return found


def _cpu_group(worker: Any, size: int) -> Any:
    state: Any = sys.modules[_PARALLEL]
    for name in ("_INNER_DP_WORLD", "_WORLD"):
        known = getattr(state, name, None)
        if known is not None and known.world_size == size:
            return known.cpu_group
    import torch.distributed as dist

    # Executors are contiguous blocks of the world. `worker.rank` counts from the executor's first
    # rank, or with an external launcher from the world's.
    first = dist.get_rank() // size * size
    # Only the members make this call, because other engines may be asleep, or may never sleep.
    return dist.new_group(
        list(range(first, first + size)), backend="gloo", use_local_synchronization=True
    )
