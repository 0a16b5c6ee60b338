"""Torch memory pools with a tag, for programs that manage their pools themselves."""

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

    Experimental: may change in any version.

    Pass it to `torch.cuda.use_mem_pool`, or its `id` to functions that capture graphs:
    `torch.cuda.graph(g, pool=pool.id)`, `torch.cuda.make_graphed_callables(..., pool=pool.id)`.
    Prefer a region if one suffices, because a region closes its pool at its end. Do not nest a
    region and a `use_mem_pool` block: torch decides which of them serves an allocation.

    Lifetime: the caller owns the pool. While a reference exists, torch reuses the memory of deleted
    tensors in the pool, `torch.cuda.empty_cache()` does not release that memory, and a pause saves
    it. When the last reference is deleted, the pool is closed, as a region's pool is at its end:
    tensors and graphs keep their memory, `empty_cache()` releases the rest, and a pause does not
    save cached free blocks.

    Pauses: a pause of the tag fails while a thread is inside `use_mem_pool` of the pool, or
    captures a graph into it. **Create no tensor in the pool while the tag is paused.** A request
    for new memory fails (torch raises OutOfMemoryError, and a `MemsaverWarning` reports the
    reason), but torch could reuse the block of a deleted tensor, which has no memory behind it.
    Replay graphs only after the resume.

    Torch allocates cuBLAS's workspace at the first matrix product of a thread and a stream, from
    the current pool, and keeps it. This function allocates the workspaces of the calling thread,
    for its current stream and for torch's capture stream, outside the pool. Warm up other threads
    or streams with a matrix product outside the pool.

    Args:
        tag: the tag of all memory in the pool, regardless of open regions.
        backup: as in `memsaver.region`.
        device: an index, "cuda:1", a `torch.device`; None is the current device.

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
        InvalidStateError: a thread is inside `use_mem_pool` of a pool, or captures into it.
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
    """Return whether a thread is using a pool; graphs that keep the pool do not count."""
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
    """Return a subclass of torch's pools that closes, but never destroys, unreferenced pools."""
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
    """Close a pool without references. May run on any thread and at any time: takes no lock."""
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
