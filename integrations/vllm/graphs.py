"""CUDA graphs in pausable memory, for versions of vLLM without `sleep_mode_offload_cudagraph`.

In each process, vLLM captures its graphs into one pool. vLLM's platform class returns the pool's
id. With MEMSAVER_VLLM_GRAPHS=1, the class returns the id of a pool of memsaver's allocator if vLLM
uses that allocator.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ..engine import hooking
from .logs import logger
from .worker import installed_allocator

__all__ = ["install"]

_PARALLEL = "vllm.distributed.parallel_state"


def install(platform: Any) -> None:
    """Wrap `get_global_graph_pool` of vLLM's platform base class. Idempotent.

    Raises:
        AttributeError: the class does not have the method.
    """
    hooking.around(platform, "get_global_graph_pool", _graph_pool)


def _graph_pool(original: Callable[..., Any], platform: Any) -> Any:
    allocator = installed_allocator()
    if allocator is None or _are_registered():
        return original(platform)
    return allocator.graph_pool()


def _are_registered() -> bool:
    """Return whether vLLM exports the graphs' memory to other processes; log the first export.

    vLLM's custom all-reduce exports the graphs' memory, and CUDA permits this only for memory that
    cudaMalloc allocated.
    """
    state = sys.modules.get(_PARALLEL)
    group = getattr(state, "_TP", None)
    custom = getattr(getattr(group, "device_communicator", None), "ca_comm", None)
    found = custom is not None and not getattr(custom, "disabled", False)
    if found:
        _log_once()
    return found


@functools.cache
def _log_once() -> None:
    logger.warning(
        "MEMSAVER_VLLM_GRAPHS has no effect: vLLM's custom all-reduce exports the memory of CUDA "
        "graphs to other ranks; start vLLM with disable_custom_all_reduce to release that memory"
    )
