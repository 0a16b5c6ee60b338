"""Torch memory pools that belong to a tag, for programs that manage their own pools."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memsaver._memory.choices import earlier_choice, note_choice
from memsaver._memory.devices import Device
from memsaver._memory.torch_mode import TorchPools, torch_pools
from memsaver._runtime.native import _C, Backup, backup_code, check_new_tag
from memsaver.errors import ConfigError, InvalidStateError, NotLoadedError

if TYPE_CHECKING:
    import torch

__all__ = ["check_unused", "torch_pool"]


def torch_pool(tag: str, backup: Backup | None = None, device: Device = None) -> torch.cuda.MemPool:
    """Create a `torch.cuda.MemPool` whose memory belongs to `tag`, on one device.

    Experimental: this API can change in any version.

    Pass the pool to `torch.cuda.use_mem_pool`, or pass its `id` to functions that capture graphs:
    `torch.cuda.graph(g, pool=pool.id)`, `torch.cuda.make_graphed_callables(..., pool=pool.id)`.
    Prefer a region if one suffices, because a region closes its pool when it ends. Do not nest a
    region and a `use_mem_pool` block, because torch decides whether the region or the block serves
    an allocation.

    Lifetime: the caller owns the pool. While a reference to the pool exists, torch reuses the
    memory of deleted tensors in the pool, `torch.cuda.empty_cache()` does not release that memory,
    and a pause saves it. When the last reference is deleted, the pool is closed, like a region's
    pool at the end of the region. After that, tensors and graphs keep their memory, `empty_cache()`
    releases all other memory of the pool, and a pause does not save cached free blocks.

    Pauses: a pause of the tag fails while a thread is inside `use_mem_pool` of the pool, or
    captures a graph into the pool. **Create no tensor in the pool while the tag is paused.** If
    torch requests new memory, the request fails: torch raises OutOfMemoryError, and a
    `MemsaverWarning` reports the reason. However, torch might instead reuse a deleted tensor's
    block, which has no physical memory. Replay graphs only after the resume.

    cuBLAS workspaces: at the first matrix product on each thread and stream, torch allocates a
    workspace from the current pool and keeps it. For the calling thread, this function allocates
    the workspaces of the current stream and of torch's capture stream outside the pool. On other
    threads or streams, run a matrix product outside the pool first.

    Args:
        tag: the tag of all memory in the pool, regardless of open regions.
        backup: as in `memsaver.region`.
        device: an index, "cuda:1", or a `torch.device`; None means the current device.

    Raises:
        ConfigError: the tag is empty or not a string, or the backup or the device is unknown.
        InvalidStateError: the tag is paused, or 256 tags already have such pools.
        NotLoadedError: there is no GPU, or no torch with CUDA.
    """
    check_new_tag(tag)
    code = backup_code(backup)
    if isinstance(device, Sequence) and not isinstance(device, str):
        raise ConfigError(f"a torch pool is on one device: create one for each of {device!r}")
    pools = torch_pools()
    if pools is None:
        raise NotLoadedError(
            "memsaver.torch_pool creates a torch pool, which needs a GPU and a torch with CUDA; "
            "the simulated driver has neither"
        )
    (index,) = pools.prepare(device)
    torch_cuda = pools.torch.cuda
    with torch_cuda.device(index):
        pools.warm_up(index, torch_cuda.graph(torch_cuda.CUDAGraph()).capture_stream)
    earlier = earlier_choice(tag, backup)
    functions = _C.torch_allocator(tag, code)
    note_choice(tag, backup, earlier)
    allocator = _allocators.setdefault(functions, pools.torch._C._cuda_customAllocator(*functions))
    with torch_cuda.device(index):
        pool = _class_for(pools)(allocator)
    _open[pool.id] = (tag, index, weakref.ref(pool))
    return pool


def check_unused(tags: Sequence[str]) -> None:
    """Check that no pool of the tags is in use.

    Raises:
        InvalidStateError: a thread is inside `use_mem_pool` of a pool, or captures a graph into a
            pool.
    """
    for tag, device, reference in list(_open.values()):
        pool = reference() if tag in tags else None
        if pool is not None and _in_use(pool, device):
            raise InvalidStateError(
                f"tag {tag!r} cannot be paused while one of its torch pools is in use: first "
                "leave every torch.cuda.use_mem_pool of the pool, and end captures into it",
                tag=tag,
            )


def _in_use(pool: Any, device: int) -> bool:
    """Return whether a thread is using a pool. A graph that keeps the pool alive does not count as
    a use.
    """
    torch = pool.owner.torch
    before = pool.use_count()
    if before <= 1:  # the pool object itself
        return False
    try:
        with torch.cuda.use_mem_pool(pool, device):  # torch raises if a thread is using the pool
            return False
    except RuntimeError:
        if pool.use_count() > before:  # torch updates its count before it raises
            torch._C._cuda_releasePool(device, pool.id)
        return True


def _class_for(pools: TorchPools) -> Any:
    """Return a subclass of torch's pool class that closes unreferenced pools but never destroys
    them.
    """
    global _class
    if _class is None:
        base = pools.torch.cuda.MemPool

        class TagPool(base):  # type: ignore[misc, valid-type]  # torch is not followed by mypy
            owner = pools

            def __del__(self) -> None:
                _close(self)

        TagPool.__name__ = TagPool.__qualname__ = base.__name__
        _class = TagPool
    return _class


def _close(pool: Any) -> None:
    """Close a pool without references. Safe on any thread and at any time, because it needs no
    lock.
    """
    # Not destroyed: see TorchPools.new_pool.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
    found = _open.pop(pool.id, None)
    if found is not None:
        pool.owner.close_pool(found[1], pool)


_class: Any = None
# Allocators by function. Never deleted, because torch's pools keep a bare pointer to them as long
# as a tensor exists.
_allocators: dict[tuple[int, int], Any] = {}
# The tag, device and object of each referenced pool, by the pool's id.
_open: dict[tuple[int, int], tuple[str, int, weakref.ref[Any]]] = {}
