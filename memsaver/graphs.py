"""CUDA graphs whose memory pool can be paused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from memsaver.blocks import block
from memsaver.errors import ConfigError, NotLoadedError
from memsaver.native import _C, backup_code, check_new_tag, emit_warnings
from memsaver.torch_mode import suspended, torch_pools

__all__ = ["graph"]


@block
def graph(
    cuda_graph: Any,
    tag: str = "cuda_graph",
    *,
    backup: str | None = None,
    pool: Any = None,
    stream: Any = None,
    capture_error_mode: str = "global",
) -> Iterator[None]:
    """`torch.cuda.graph`, with the graph's memory in a tag.

    Pause the tag to free what the graph holds between replays; resume it before the next replay.

    Args:
        cuda_graph: a `torch.cuda.CUDAGraph` to capture into.
        tag: the tag of its memory.
        backup: as in `region`. With "none" the outputs of the last replay are lost by a pause, and
            a replay makes them again.
        pool: graphs captured with the same one share their memory, as with torch: what an earlier
            graph's `pool()` or `torch.cuda.graph_pool_handle()` returns. Graphs of another tag, or
            captured by `torch.cuda.graph`, have no part in it, unless the pool is of a graph that
            was captured here.
        stream: the stream to capture on; None is a side stream of torch's.
        capture_error_mode: torch's.

    Memory allocated inside belongs to the tag, on other threads too if for the captured stream.

    Raises:
        ConfigError: an empty tag, an unknown backup, or an invalid `pool`.
        InvalidStateError: the tag is paused.
        NotLoadedError: no GPU, or no torch with CUDA: there is nothing to capture.
    """
    check_new_tag(tag)
    code = backup_code(backup)
    pools = torch_pools()
    if pools is None:
        raise NotLoadedError(
            "memsaver.graph captures a CUDA graph with torch, which needs a GPU and a torch with "
            "CUDA; the simulated driver has neither"
        )
    torch = pools.torch
    if not isinstance(cuda_graph, torch.cuda.CUDAGraph):
        raise ConfigError(
            f"memsaver.graph takes a torch.cuda.CUDAGraph, not {type(cuda_graph).__name__}"
        )
    device = torch.cuda.current_device()
    stream = stream if stream is not None else pools.capture_stream(device)
    with suspended(), contextlib.ExitStack() as undo:
        pools.warm_up(device, stream)
        pool_id = undo.enter_context(pools.capture_pool(device, tag, pool))
        _C.region_enter(tag, code)
        undo.callback(_C.region_exit)
        _C.stream_bind(stream.cuda_stream, tag, code)
        undo.callback(_C.stream_unbind, stream.cuda_stream)
        with torch.cuda.graph(
            cuda_graph, pool=pool_id, stream=stream, capture_error_mode=capture_error_mode
        ):
            yield
    emit_warnings()
