"""CUDA graphs whose memory can be paused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from memsaver._memory.choices import earlier_choice, note_choice
from memsaver._memory.torch_mode import suspended, torch_pools
from memsaver._runtime.blocks import block
from memsaver._runtime.native import _C, Backup, backup_code, check_new_tag, emit_warnings
from memsaver.errors import ConfigError, NotLoadedError

__all__ = ["graph"]


@block
def graph(
    cuda_graph: Any,
    tag: str = "cuda_graph",
    *,
    backup: Backup | None = None,
    pool: Any = None,
    stream: Any = None,
    capture_error_mode: str = "global",
) -> Iterator[tuple[int, int]]:
    """Capture a CUDA graph like `torch.cuda.graph`, and assign the graph's memory to a tag.

    Pause the tag to release the graph's memory between replays; resume it before the next replay.

    Args:
        cuda_graph: a `torch.cuda.CUDAGraph` to capture into.
        tag: the tag of the graph's memory.
        backup: as in `region`. With "none", a pause discards the outputs of the last replay, and
            the next replay computes them again.
        pool: the result of an earlier graph's `pool()` or of `torch.cuda.graph_pool_handle()`. As
            in torch, graphs captured with the same pool share memory. Graphs of another tag, and
            graphs that `torch.cuda.graph` captured, share this memory only if `pool` comes from a
            graph that this function captured.
        stream: the stream to capture on; None means one of torch's side streams.
        capture_error_mode: as in `torch.cuda.graph`.

    Yields:
        The id of the torch pool that contains the graph's memory. It differs from `pool` if
        memsaver replaced that pool with its own.

    All memory allocated in the block belongs to the tag, even if another thread allocates it on the
    captured stream.

    Raises:
        ConfigError: the tag is empty, the backup is unknown, or `pool` is invalid.
        InvalidStateError: the tag is paused.
        NotLoadedError: there is no GPU, or no torch with CUDA.
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
        earlier = earlier_choice(tag, backup)
        _C.region_enter(tag, code)
        undo.callback(_C.region_exit)
        note_choice(tag, backup, earlier)
        _C.stream_bind(stream.cuda_stream, tag, code)
        undo.callback(_C.stream_unbind, stream.cuda_stream)
        with torch.cuda.graph(
            cuda_graph, pool=pool_id, stream=stream, capture_error_mode=capture_error_mode
        ):
            yield pool_id
    emit_warnings()
