"""torch mode: torch's memory pools over memsaver's allocator.

The only module that knows torch's allocator. Importing it does not import torch.

A region gets a `torch.cuda.MemPool` of its own, over the allocator functions of libmemsaver.so, and
the pool is closed when the region is left. From then on torch allocates nothing more in the pool's
segments: a block can only die, so what is dead when a pause asks stays dead, and segments without
live blocks go back with `torch.cuda.empty_cache()`, which keeps those of open pools.
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

from memsaver import pickling
from memsaver.devices import Device, Devices
from memsaver.errors import ConfigError, NotLoadedError
from memsaver.native import _C, LIBRARY_DIR
from memsaver.preload import is_preloaded
from memsaver.shortages import describe

__all__ = ["Route", "TorchPools", "torch_pools"]


def torch_pools(required: bool = True) -> TorchPools | None:
    """The process's torch pools, or None where torch cannot have any: see `required`.

    Takes no lock, nor does anything in this module: a finalizer or a signal handler may need the
    pools during a call of the same thread.

    Args:
        required: raise where nothing at all could serve a region: a real driver, but neither torch
            with CUDA nor preload mode. Without it, torch is not imported for the question.

    Raises:
        NotLoadedError: with `required`, where there is no CUDA driver, or no torch with CUDA.
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
    """Routes each thread's tensors to the pools of its open regions. Any thread."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        # Kept for ever: torch's pools hold a bare pointer to it as long as a tensor lives.
        self._allocator = torch.cuda.memory.CUDAPluggableAllocator(
            str(LIBRARY_DIR / "libmemsaver.so"), "ms_torch_malloc", "ms_torch_free"
        )

    def new_pool(self, device: int) -> Any:
        """A `MemPool` whose segments come from memsaver, for one device. Ends with `close_pool`."""
        with self.torch.cuda.device(device):
            pool = self.torch.cuda.MemPool(self._allocator.allocator())
        # Never destroyed: its destructor ends the process (an assertion in a destructor) when any
        # thread captures a graph or uses a pool at that moment.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
        return pool

    def close_pool(self, device: int, pool: Any) -> None:
        """Give up the reference that keeps a pool open; tensors and graphs keep what they use.

        Takes no lock: a finalizer may call it.
        """
        self.torch._C._cuda_releasePool(device, pool.id)
        _closed_pools[_pool_id(pool)] = pool

    def release_closed_pools(self) -> None:
        """Return the memory of closed pools that no tensor uses to the driver.

        torch can empty a single pool only in a destructor, which may end the process (see
        `new_pool`). While a pool is in use, torch's `empty_cache()` spares torch's own default
        pool, whose cached blocks other code uses; torch versions that refuse the call in a pool
        empty the default pool too. During a graph capture everything stays cached.
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
        """The id of the pool to capture a graph into; inside, the pool is there.

        None is a new pool. A pool of ours, which an earlier graph has, is itself. Any other, such
        as `torch.cuda.graph_pool_handle()`, or one of ours whose graphs are gone, would get its
        memory elsewhere: a pool of ours stands for it, one per device and tag, for as long as a
        graph keeps it.

        Raises:
            ConfigError: it is no pool.
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
                self.close_pool(device, fresh)  # from then on the graph keeps it

    def prepare(self, devices: Devices) -> list[int]:
        """The indices of the devices that a caller named, ready for a region. Call it outside."""
        indices = self.indices(devices)
        with suspended():  # of a region around this one
            _C.disable_enter()
            try:
                for device in indices:
                    self.warm_up(device)
            finally:
                _C.region_exit()
        _C.refresh_peers()
        return indices

    def route(self, tag: str, devices: list[int]) -> Route:
        """Send this thread's tensors to pools for `tag` until the route is closed."""
        around = _routes.current
        shared = around.pools if around is not None and around.tag == tag else {}
        pools = {device: shared[device] for device in devices if device in shared}
        return Route(self, tag, pools, [device for device in devices if device not in shared])

    def unrouted(self) -> Route:
        """Send this thread's tensors where they go without regions, until the route is closed.

        That is torch's own pool; under a process-wide tag that one's cached blocks may lie in
        paused memory, so it is a pool apart.
        """
        if not (is_preloaded() and os.environ.get("MEMSAVER_TAG")):
            return Route(self, None, {}, [])
        return Route(self, None, {}, [self.torch.cuda.current_device()])

    def warm_up(self, device: int, stream: Any = None) -> None:
        """Let cuBLAS take its workspace for the thread and the stream now, outside of any tag.

        torch makes it in whatever pool is active at the first matrix product and keeps it for ever:
        inside a region it would be paused with the tag, under every later product.
        """
        torch = self.torch
        with torch.cuda.device(device), torch.cuda.stream(stream):
            torch.cuda.current_blas_handle()

    def capture_stream(self, device: int) -> Any:
        """The stream that graphs of a device are captured on where the caller names none."""
        if device not in _capture_streams:
            _capture_streams.setdefault(device, self.torch.cuda.Stream(device))
        return _capture_streams[device]

    def indices(self, devices: Devices) -> list[int]:
        """The indices of the devices that a caller named."""
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
            raise ConfigError(f"{device!r} is no device: {error}") from None
        if found.type != "cuda" or (found.index is not None and found.index >= count):
            raise ConfigError(f"{device!r} is no CUDA device here: torch sees {count}")
        return self.torch.cuda.current_device() if found.index is None else int(found.index)

    def is_capturing(self) -> bool:
        """True while this thread's current stream is being captured."""
        return bool(self.torch.cuda.is_current_stream_capturing())

    def dead_ranges(self) -> list[tuple[int, int]]:
        """Address and bytes of the blocks without a tensor in closed pools of ours."""
        dead = []
        for segment in self._segments():
            if tuple(segment.get("segment_pool_id", (0, 0))) not in _closed_pools:
                continue  # in torch's own pool, or a user's, any thread may reuse a block
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    dead.append((block["address"], block["size"]))
        return dead

    def live_ranges(self, allocations: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Address and bytes of what lives in allocations of ours, in the order of addresses.

        Where an allocation is a segment of torch's, that is its tensors, with the sizes they asked
        for; else it is the whole allocation.
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
        """Whether an address lies in a segment of torch's, and address and bytes of its tensor."""
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
        """Address and bytes of torch's segments in pools apart: of graphs, and of users."""
        return [
            (segment["address"], segment["total_size"])
            for segment in self.torch.cuda.memory_snapshot()
            if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
        ]

    def _segments(self) -> list[dict[str, Any]]:
        """The segments of torch that lie in memory of ours, as torch describes them."""
        snapshot = self.torch.cuda.memory_snapshot()
        return [segment for segment in snapshot if _C.owns(segment["address"])]


class Route:
    """One level of a thread's routing; only the innermost is active. Close in reverse order.

    Uses `pools`, which another level owns, and pools of its own for the devices in `own`.
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
        """End this level and make the one around it active again."""
        _routes.current = self._around
        self._undo.close()
        if self.tag is None and self.pools:  # no code can allocate from these pools any more
            self.owner.release_closed_pools()

    def explain_shortage(self, error: BaseException | None) -> None:
        """Add to torch's out-of-memory error who holds the memory of the devices: a note to it.

        Once, where routes are nested. Notes are shown with the traceback from Python 3.11 on;
        before that there are none.
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
    """No route of this thread is active inside: a graph capture has a pool of its own."""
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
    """Whether a graph keeps a closed pool; torch raises where it has forgotten the pool."""
    try:
        return bool(pool.use_count() > 0)
    except RuntimeError:
        return False


def _pool_id(pool: Any) -> tuple[int, int]:
    """The id of a `MemPool`, or the id itself."""
    try:
        first, second = map(int, getattr(pool, "id", pool))
    except (TypeError, ValueError):
        raise ConfigError(
            f"pool is what a graph's pool() or torch.cuda.graph_pool_handle() returns, not {pool!r}"
        ) from None
    return first, second


class _Routes(threading.local):
    current: Route | None = None


_routes = _Routes()
_pools: list[TorchPools] = []  # the first is the process's; others lost a race, and are not used
_capture_streams: dict[int, Any] = {}
_spare_pools: dict[int, Any] = {}  # by device: an open, empty pool
_closed_pools: dict[tuple[int, int], Any] = {}  # by the pool's id
# By device, tag and the caller's pool: the pool of ours that stands for it.
_shared_pools: dict[tuple[int, str, tuple[int, int]], Any] = {}
