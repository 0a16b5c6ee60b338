"""Torch mode: torch memory pools that use memsaver's allocator.

This is the only module that depends on torch's allocator. Importing this module does not import
torch.

Each region has its own `torch.cuda.MemPool`, which uses the allocator functions of libmemsaver.so.
The pool is closed at the end of the region. After that, torch allocates nothing in the pool's
segments, so blocks that are free before a pause stay free. `torch.cuda.empty_cache()` releases the
segments of closed pools that have no live blocks.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from memsaver._memory import pickling
from memsaver._memory.devices import Device, Devices
from memsaver._memory.preload import is_preloaded
from memsaver._memory.shortages import describe
from memsaver._runtime.native import _C, LIBRARY_DIR
from memsaver.errors import ConfigError, NotLoadedError

__all__ = ["Route", "TorchPools", "torch_pools"]


def torch_pools(required: bool = True) -> TorchPools | None:
    """Return the process's torch pools, or None if they are unavailable (see `required`).

    Like all functions in this module, this function acquires no lock, because a finalizer or a
    signal handler might need the pools during another call on the same thread.

    Args:
        required: whether to raise an error if no allocator could serve a region. No allocator can
            serve a region if the driver is real and neither torch with CUDA nor preload mode is
            available. If False, torch is not imported for this check.

    Raises:
        NotLoadedError: `required` is True, and there is no CUDA driver, or no allocator could serve
            a region.
    """
    if _pools:
        return _pools[0]
    try:
        _, library, simulated = _C.driver_info()
    except NotLoadedError:
        if required:
            raise
        return None
    if simulated:
        return None
    if "torch" not in sys.modules and (not required or importlib.util.find_spec("torch") is None):
        if required and not is_preloaded():
            raise NotLoadedError(
                "a region needs torch, which is not installed, or preload mode "
                "(`memsaver run -- python ...`)"
            )
        return None
    import torch

    if not torch.cuda.is_available():
        if required and not is_preloaded():
            raise NotLoadedError(
                f"a region needs a torch that can use CUDA: torch {torch.__version__} finds no "
                f"GPU, though {library} was opened; install a CUDA build of torch"
            )
        return None
    pickling.register(torch)
    _pools.append(TorchPools(torch))
    return _pools[0]


class TorchPools:
    """Routes each thread's tensors to the pools of the thread's open regions. Thread-safe."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        # Never deleted: torch's pools keep a bare pointer to the allocator as long as a tensor
        # exists.
        self._allocator = torch.cuda.memory.CUDAPluggableAllocator(
            str(LIBRARY_DIR / "libmemsaver.so"), "ms_torch_malloc", "ms_torch_free"
        )

    def new_pool(self, device: int) -> Any:
        """Create a `MemPool` for one device. Close it with `close_pool`."""
        with self.torch.cuda.device(device):
            pool = self.torch.cuda.MemPool(self._allocator.allocator())
        # Never destroyed: its destructor aborts the process (a failed assertion) if any thread is
        # capturing a graph or using a pool at that moment.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
        return pool

    def close_pool(self, device: int, pool: Any) -> None:
        """Release the reference that keeps a pool open. Tensors and graphs keep their memory.

        Safe in finalizers, because the function acquires no lock.
        """
        self.torch._C._cuda_releasePool(device, pool.id)
        _closed_pools[_pool_id(pool)] = pool

    def release_closed_pools(self) -> None:
        """Release the unused memory of closed pools to the driver.

        torch can empty a single pool only in the pool's destructor, which may abort the process
        (see `new_pool`). Therefore, this function calls `empty_cache()` while a spare pool is in
        use, so that torch keeps the cached blocks of its default pool, which other code uses. On
        torch versions that reject this call, the default pool is emptied too. During a graph
        capture, all memory stays cached.
        """
        torch = self.torch
        if self.is_capturing():
            return
        devices = filter(torch._C._cuda_hasPrimaryContext, range(torch.cuda.device_count()))
        with suspended():
            try:
                with contextlib.ExitStack() as in_use:
                    for device in devices:
                        if device not in _spare_pools:
                            _spare_pools[device] = self.new_pool(device)
                        in_use.enter_context(torch.cuda.use_mem_pool(_spare_pools[device], device))
                    torch.cuda.empty_cache()
            except RuntimeError:
                with contextlib.suppress(RuntimeError):
                    torch.cuda.empty_cache()

    @contextlib.contextmanager
    def capture_pool(self, device: int, tag: str, pool: Any) -> Iterator[tuple[int, int]]:
        """Yield the id of the pool for a graph capture. The pool exists during the block.

        If `pool` is None, a new pool is used. A memsaver pool of an earlier graph is used
        unchanged. Any other pool, such as `torch.cuda.graph_pool_handle()` or a memsaver pool whose
        graphs were deleted, is replaced by a memsaver pool, because torch would not allocate its
        memory with memsaver. For each pair of a device and a tag, the replacement stays the same as
        long as a graph uses it.

        Raises:
            ConfigError: `pool` is not a torch pool or the id of a pool.
        """
        name = None if pool is None else _pool_id(pool)
        ours = _closed_pools.get(name) if name is not None else None
        shared = _shared_pools.get((device, tag, name)) if name is not None else None
        if name is not None and ours is not None and _is_kept(ours):
            yield name
        elif shared is not None and _is_kept(shared):
            yield _pool_id(shared)
        else:
            fresh = self.new_pool(device)
            if name is not None:
                _shared_pools[device, tag, name] = fresh
            try:
                yield _pool_id(fresh)
            finally:
                self.close_pool(device, fresh)  # the graph itself keeps the pool alive

    def prepare(self, devices: Devices, *, warm_up: bool = True) -> list[int]:
        """Prepare devices for a new region, before it begins, and return their indices.

        Args:
            devices: the devices, as in `memsaver.region`.
            warm_up: whether to call the method `warm_up` for each device and the thread's current
                stream.
        """
        indices = self.indices(devices)
        if warm_up:
            with suspended():  # routes of outer regions
                _C.disable_enter()
                try:
                    for device in indices:
                        self.warm_up(device)
                finally:
                    _C.region_exit()
        _C.refresh_peers()
        return indices

    def route(self, tag: str, devices: list[int]) -> Route:
        """Route this thread's tensors to pools for `tag` until the route is closed."""
        around = _routes.current
        shared = around.pools if around is not None and around.tag == tag else {}
        pools = {device: shared[device] for device in devices if device in shared}
        return Route(self, tag, pools, [device for device in devices if device not in shared])

    def unrouted(self) -> Route:
        """Route this thread's tensors outside all regions until the route is closed.

        The target is torch's default pool. With a process-wide tag, the target is a separate pool,
        because cached blocks of the default pool may be in paused memory.
        """
        if not (is_preloaded() and os.environ.get("MEMSAVER_TAG")):
            return Route(self, None, {}, [])
        return Route(self, None, {}, [self.torch.cuda.current_device()])

    def warm_up(self, device: int, stream: Any = None) -> None:
        """Make cuBLAS allocate its workspace for this thread and the stream now, outside any tag.

        Otherwise, torch allocates the workspace from the active pool at the first matrix product,
        and keeps it permanently. If this happens inside a region, the workspace is paused with the
        tag, even though every later matrix product uses it.
        """
        torch = self.torch
        with torch.cuda.device(device), torch.cuda.stream(stream):
            torch.cuda.current_blas_handle()

    def capture_stream(self, device: int) -> Any:
        """Return the default stream for graph captures on a device."""
        if device not in _capture_streams:
            _capture_streams.setdefault(device, self.torch.cuda.Stream(device))
        return _capture_streams[device]

    def indices(self, devices: Devices) -> list[int]:
        """Return the indices of the named devices."""
        if devices is None:
            return [self.torch.cuda.current_device()]
        if isinstance(devices, Sequence) and not isinstance(devices, str):
            return sorted({self._index(device) for device in devices})
        return [self._index(devices)]

    def _index(self, device: Device) -> int:
        count = self.torch.cuda.device_count()
        try:
            found = self.torch.device("cuda", device) if isinstance(device, int) else None
            found = found if found is not None else self.torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(f"{device!r} is not a device: {error}") from None
        if found.type != "cuda" or (found.index is not None and found.index >= count):
            raise ConfigError(f"{device!r} does not exist: torch finds {count} CUDA devices")
        return self.torch.cuda.current_device() if found.index is None else int(found.index)

    def is_capturing(self) -> bool:
        """Return whether this thread's current stream is being captured."""
        return bool(self.torch.cuda.is_current_stream_capturing())

    def unowned_ranges(self) -> list[tuple[int, int]]:
        """Return the address and size of each unowned block in memsaver's closed pools."""
        unowned = []
        for segment in self._segments():
            if tuple(segment.get("segment_pool_id", (0, 0))) not in _closed_pools:
                continue  # any thread may reuse a block of torch's or a program's own pool
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    unowned.append((block["address"], block["size"]))
        return unowned

    def live_ranges(self, allocations: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the addresses and sizes of the live parts of memsaver's allocations, in address
        order.

        The live parts of a torch segment are its tensors, with their requested sizes. Any other
        allocation is live as a whole.
        """
        segments = {segment["address"]: segment for segment in self._segments()}
        live = []
        for address, nbytes in allocations:
            if address not in segments:
                live.append((address, nbytes))
                continue
            for block in segments[address]["blocks"]:
                if block["state"] == "active_allocated":
                    live.append((block["address"], block["requested_size"]))
        return sorted(live)

    def tensor_around(self, address: int) -> tuple[bool, tuple[int, int] | None]:
        """Return whether an address is in a torch segment, and its tensor's range, if any."""
        for segment in self._segments():
            if not segment["address"] <= address < segment["address"] + segment["total_size"]:
                continue
            for block in segment["blocks"]:
                start, nbytes = block["address"], block["requested_size"]
                if block["state"] == "active_allocated" and start <= address < start + nbytes:
                    return True, (start, nbytes)
            return True, None
        return False, None

    def private_ranges(self) -> list[tuple[int, int]]:
        """Return the addresses and sizes of torch's segments in private pools."""
        return [
            (segment["address"], segment["total_size"])
            for segment in self.torch.cuda.memory_snapshot()
            if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
        ]

    def _segments(self) -> list[dict[str, Any]]:
        """Return torch's descriptions of its segments in memsaver's memory."""
        snapshot = self.torch.cuda.memory_snapshot()
        return [segment for segment in snapshot if _C.owns(segment["address"])]


class Route:
    """One level of a thread's routing. Only the innermost level is active, and it is closed first.

    A level uses `pools`, which another level owns, and creates pools for the devices in `own`.
    """

    def __init__(
        self, owner: TorchPools, tag: str | None, pools: dict[int, Any], own: list[int]
    ) -> None:
        self.owner = owner
        self.tag = tag
        self._active: contextlib.ExitStack | None = None
        self._around = _routes.current
        with contextlib.ExitStack() as undo:
            own_pools = {}
            for device in own:
                own_pools[device] = owner.new_pool(device)
                undo.callback(owner.close_pool, device, own_pools[device])
            self.pools = {**pools, **own_pools}
            if self._around is not None:
                self._around._stop()
                undo.callback(self._around._start)
            self._start()
            undo.callback(self._stop)
            self._undo = undo.pop_all()
        _routes.current = self

    def close(self) -> None:
        """End this level, and make the enclosing level active again."""
        _routes.current = self._around
        self._undo.close()
        if self.tag is None and self.pools:  # no code can allocate from these pools now
            self.owner.release_closed_pools()

    def explain_shortage(self, error: BaseException | None) -> None:
        """Add a note to torch's out-of-memory error, with the tags and processes that use the
        memory.

        If several nested routes handle the same error, only the first route adds the note. Python
        3.11 and newer show notes in tracebacks.
        """
        if not isinstance(error, self.owner.torch.OutOfMemoryError):
            return
        if hasattr(error, "add_note") and not hasattr(error, "__notes__"):
            for device in self.pools:
                error.add_note(describe(device))

    def _start(self) -> None:
        with contextlib.ExitStack() as stack:
            for device, pool in self.pools.items():
                stack.enter_context(self.owner.torch.cuda.use_mem_pool(pool, device))
            self._active = stack.pop_all()

    def _stop(self) -> None:
        if self._active is not None:
            self._active.close()
            self._active = None


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Suspend this thread's routes during the block, for example during a graph capture."""
    route = _routes.current
    if route is None:
        yield
        return
    route._stop()
    _routes.current = None
    try:
        yield
    finally:
        _routes.current = route
        route._start()


def _is_kept(pool: Any) -> bool:
    """Return whether a graph keeps a closed pool alive."""
    try:
        return bool(pool.use_count() > 0)
    except RuntimeError:  # the pool no longer exists
        return False


def _pool_id(pool: Any) -> tuple[int, int]:
    """Return the id of a `MemPool`, or return an id unchanged."""
    try:
        first, second = map(int, getattr(pool, "id", pool))
    except (TypeError, ValueError):
        raise ConfigError(
            "pool must be the result of a graph's pool() or torch.cuda.graph_pool_handle(), not "
            f"{pool!r}"
        ) from None
    return first, second


class _Routes(threading.local):
    current: Route | None = None


_routes = _Routes()
_pools: list[TorchPools] = []  # the first is in use; others lost a race and are unused
_capture_streams: dict[int, Any] = {}
_spare_pools: dict[int, Any] = {}  # by device: an open pool without memory
_closed_pools: dict[tuple[int, int], Any] = {}  # by the pool's id
# By device, tag and the caller's pool: the memsaver pool that replaces it.
_shared_pools: dict[tuple[int, str, tuple[int, int]], Any] = {}
