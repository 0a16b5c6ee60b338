"""Torch memory pools of a tag, for programs that manage their pools themselves."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memsaver.devices import Device
from memsaver.errors import ConfigError, InvalidStateError, NotLoadedError
from memsaver.native import _C, backup_code, check_new_tag
from memsaver.torch_mode import TorchPools, torch_pools

if TYPE_CHECKING:
    import torch

__all__ = ["check_unused", "torch_pool"]


def torch_pool(tag: str, backup: str | None = None, device: Device = None) -> torch.cuda.MemPool:
    """A new `torch.cuda.MemPool` whose memory belongs to `tag`, on one device.

    For `torch.cuda.use_mem_pool`, and, by its `id`, for what captures graphs:
    `torch.cuda.graph(g, pool=pool.id)`, `torch.cuda.make_graphed_callables(..., pool=pool.id)`.
    Where a region will do, a region is better: it closes its pool when it is left. The two are not
    for each other's inside: which of a region and a `use_mem_pool` gets a tensor is torch's affair.

    Who keeps it: you do. While you keep it, torch reuses what deleted tensors leave in it, nothing
    of that goes back by `torch.cuda.empty_cache()`, and a pause saves it with the rest. When the
    last reference is gone the pool is closed, as a region's is when that is left: tensors and
    graphs keep what they use, `empty_cache()` gives back the rest, and dead blocks are not saved.

    Pauses: a pause of the tag is refused while a thread is inside `use_mem_pool` of the pool, or
    captures a graph into it. **While the tag is paused, make no tensor in the pool.** New memory is
    refused (torch raises its OutOfMemoryError, a `MemsaverWarning` says why), but torch would hand
    out the block of a deleted tensor, which has no memory behind it then. Replay graphs after the
    resume.

    Torch makes cuBLAS's workspace at the first matrix product of a thread and a stream, in whatever
    pool is in use, and uses it ever after. Those of the calling thread, for its current stream and
    for the one that torch captures on, are made here, outside; another thread or stream is best
    warmed up with a matrix product outside of the pool.

    Args:
        tag: the tag of all its memory, whatever regions are open around.
        backup: as in `memsaver.region`.
        device: an index, "cuda:1", a `torch.device`; None is the current device.

    Raises:
        ConfigError: the tag is empty or no string, the backup or the device unknown.
        InvalidStateError: the tag is paused; or 256 tags have such pools already.
        NotLoadedError: no GPU, or no torch with CUDA.
    """
    check_new_tag(tag)
    code = backup_code(backup)
    if isinstance(device, Sequence) and not isinstance(device, str):
        raise ConfigError(f"a torch pool is on one device: make one for each of {device!r}")
    pools = torch_pools()
    if pools is None:
        raise NotLoadedError(
            "memsaver.torch_pool makes a pool of torch's, which needs a GPU and a torch with CUDA; "
            "the simulated driver has neither"
        )
    (index,) = pools.prepare(device)
    torch_cuda = pools.torch.cuda
    with torch_cuda.device(index):
        pools.warm_up(index, torch_cuda.graph(torch_cuda.CUDAGraph()).capture_stream)
    functions = _C.torch_allocator(tag, code)
    allocator = _allocators.setdefault(functions, pools.torch._C._cuda_customAllocator(*functions))
    with torch_cuda.device(index):
        pool = _class_for(pools)(allocator)
    _open[pool.id] = (tag, index, weakref.ref(pool))
    return pool


def check_unused(tags: Sequence[str]) -> None:
    """Whether no pool of the tags is in use.

    Raises:
        InvalidStateError: a thread is inside `use_mem_pool` of one, or captures into it.
    """
    for tag, device, reference in list(_open.values()):
        pool = reference() if tag in tags else None
        if pool is not None and _in_use(pool, device):
            raise InvalidStateError(
                f"tag {tag!r} cannot be paused while a torch pool of it is in use: leave every "
                "torch.cuda.use_mem_pool of it, and end captures into it, first",
                tag=tag,
            )


def _in_use(pool: Any, device: int) -> bool:
    """Whether a thread allocates from a pool now; graphs that keep it do not count."""
    torch = pool.owner.torch
    before = pool.use_count()
    if before <= 1:  # the pool object itself
        return False
    try:
        with torch.cuda.use_mem_pool(pool, device):  # torch refuses where somebody is in it
            return False
    except RuntimeError:
        if pool.use_count() > before:  # counted before it was refused
            torch._C._cuda_releasePool(device, pool.id)
        return True


def _class_for(pools: TorchPools) -> Any:
    """The class of torch's pools; one that nobody refers to is closed, not destroyed."""
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
    """A pool's last reference is gone: close it. On any thread, anywhere: takes no lock of ours."""
    # Never destroyed: see TorchPools.new_pool.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
    found = _open.pop(pool.id, None)
    if found is not None:
        pool.owner.close_pool(found[1], pool)


_class: Any = None
# By their functions. Kept for ever: torch's pools hold a bare pointer as long as a tensor lives.
_allocators: dict[tuple[int, int], Any] = {}
# Those that somebody refers to: tag, device and pool, by the pool's id.
_open: dict[tuple[int, int], tuple[str, int, weakref.ref[Any]]] = {}
