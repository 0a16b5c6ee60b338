"""Move the storages of CUDA tensors into a tag without changing the tensor objects."""

from __future__ import annotations

from typing import Any

from memsaver._inspection.statistics import device_memory
from memsaver._memory.regions import region
from memsaver._memory.torch_mode import suspended, torch_pools
from memsaver._runtime.native import _C
from memsaver._runtime.text import size_text
from memsaver.errors import InvalidStateError, MemsaverError, OutOfDeviceMemoryError

from .holdings import Holding
from .places import tag_of

__all__ = ["DeviceStorages"]

# The size of a batch of storages, which share a region and therefore a pool. Many small pools waste
# memory, but a batch exists twice while it is moved.
_BATCH_BYTES = 512 << 20


class DeviceStorages:
    """Moves the memory of CUDA tensors."""

    def takes(self, holding: Holding) -> bool:
        """Return whether a tensor is in device memory."""
        return bool(holding.tensor.is_cuda)

    def move(self, tensors: list[Any], tag: str) -> None:
        """Move the storage of each tensor, with its contents, into the tag's memory.

        Releases the old memory. Tensors that share a storage before the call still share a storage
        afterwards. The function first waits for all work on the devices and, at the end, for its
        own copies. No other thread may use the storages during the call.

        Raises:
            OutOfDeviceMemoryError: only the storages that precede the failing storage were moved.
                All storages remain usable, and repeating the call moves the remaining ones.
            InvalidStateError: the thread is inside `use_mem_pool`, whose pool would receive the
                memory.
        """
        import torch

        waiting = [tensor.untyped_storage() for tensor in tensors]
        devices = {storage.device for storage in waiting}
        for device in devices:
            torch.cuda.synchronize(device)
        # Runs outside all regions: inside a region, empty_cache keeps memory that torch caches
        # elsewhere.
        with suspended():
            torch.cuda.empty_cache()
            try:
                while waiting:
                    batch = _batch(waiting)
                    try:
                        _move_batch(batch, tag)
                    finally:
                        torch.cuda.empty_cache()
                    del waiting[: len(batch)]
            finally:
                # Other streams may use the new addresses after the call.
                for device in devices:
                    torch.cuda.current_stream(device).synchronize()

    def trim(self, tag: str) -> None:
        """Release the memory of the tag's deleted tensors from segments without live tensors.

        For example, the memory may belong to gradients that the last pause moved into the tag.
        Torch does not reuse this memory, and releases it together with the rest of torch's cache.
        """
        import torch

        pools = torch_pools(required=False)
        unowned = pools.unowned_ranges() if pools is not None else []
        segments = dict(_C.ranges(tag)) if unowned else {}
        if any(address in segments and nbytes >= segments[address] for address, nbytes in unowned):
            with suspended():
                torch.cuda.empty_cache()


def _batch(waiting: list[Any]) -> list[Any]:
    """Return the next storages to move together, as many as memory permits but at least one."""
    room = min(device_memory(index)[0] for index in {s.device.index for s in waiting}) // 2
    taken, total = 1, waiting[0].nbytes()
    for storage in waiting[1:]:
        total += storage.nbytes()
        if total > min(room, _BATCH_BYTES):
            break
        taken += 1
    return waiting[:taken]


def _move_batch(batch: list[Any], tag: str) -> None:
    """Move storages into a new region."""
    import torch

    devices = sorted({storage.device.index for storage in batch})
    try:
        with region(tag, device=devices):
            for device in devices:
                _check_pool(device, tag)
            for storage in batch:
                _move(storage, tag)
    except torch.OutOfMemoryError as error:  # raised for a storage, or for the region itself
        storage = next((s for s in batch if tag_of(s) != tag), batch[-1])
        nbytes, index = storage.nbytes(), storage.device.index
        free = device_memory(index)[0]
        failure = OutOfDeviceMemoryError(
            f"CUDA out of memory: moving {size_text(nbytes)} of {storage.device} into tag {tag!r} "
            f"temporarily needs as much memory again, and {size_text(free)} are free. Tensors that "
            "were already moved stay in the tag, the others are unchanged: free some memory and "
            "repeat the call",
            tag=tag,
        )
        failure.needed, failure.free = nbytes, free
        raise failure from error


def _check_pool(device: int, tag: str) -> None:
    """Check that torch allocates this thread's memory from the open region's pool.

    If several pools are open, torch chooses one of them.
    """
    import torch

    probe = torch.empty(1, dtype=torch.uint8, device=torch.device("cuda", device))
    if tag_of(probe.untyped_storage()) != tag:
        raise InvalidStateError(
            f"cannot move memory into tag {tag!r}: torch allocates this thread's memory from "
            "another pool; leave torch.cuda.use_mem_pool first. Nothing was moved",
            tag=tag,
        )


def _move(storage: Any, tag: str) -> None:
    """Move a storage into the open region."""
    import torch

    device = storage.device
    stream = torch.cuda.current_stream(device)
    # The old memory's next user waits for the copy, whatever stream it runs on.
    torch.empty(0, dtype=torch.uint8, device=device).set_(storage).record_stream(stream)
    storage.resize_(storage.nbytes())  # new memory from the region's pool, and a copy
    if tag_of(storage) != tag:
        raise MemsaverError(
            f"torch {torch.__version__} did not allocate memory of tag {tag!r} for a storage that "
            "was being moved there: regions do not support its allocator",
            tag=tag,
        )
