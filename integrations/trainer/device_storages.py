"""Moving the storages of CUDA tensors into a tag, in place."""

from __future__ import annotations

from typing import Any

from memsaver.errors import MemsaverError, OutOfDeviceMemoryError
from memsaver.integrations.trainer.holdings import Holding
from memsaver.integrations.trainer.places import tag_of
from memsaver.regions import region
from memsaver.statistics import device_memory
from memsaver.text import size_text

__all__ = ["DeviceStorages"]

# Storages that share a region, and so a pool: many small pools waste memory, a large batch exists
# twice for a moment.
_BATCH_BYTES = 512 << 20


class DeviceStorages:
    """The memory of CUDA tensors."""

    def takes(self, holding: Holding) -> bool:
        """Whether a tensor is in device memory."""
        return bool(holding.tensor.is_cuda)

    def move(self, storages: list[Any], tag: str) -> None:
        """Give each storage memory of the tag, with its contents, and its old memory back.

        Whatever shares a storage shares it afterwards. Waits for all work of the devices first. No
        other thread may use the storages meanwhile.

        Raises:
            OutOfDeviceMemoryError: storages before that one are moved, that one and those after it
                are where they were. All may be used, and the same call goes on from there.
        """
        import torch

        waiting = list(storages)
        for device in {storage.device for storage in waiting}:
            torch.cuda.synchronize(device)
        while waiting:
            torch.cuda.empty_cache()  # outside of a region: inside, torch keeps its other caches
            batch = _batch(waiting)
            devices = sorted({storage.device.index for storage in batch})
            try:
                with region(tag, device=devices):
                    for storage in batch:
                        _move(storage, tag)
            finally:
                torch.cuda.empty_cache()
            del waiting[: len(batch)]


def _batch(waiting: list[Any]) -> list[Any]:
    """The next storages to move together: one, or as many as leave room."""
    room = min(device_memory(index)[0] for index in {s.device.index for s in waiting}) // 2
    taken, total = 1, waiting[0].nbytes()
    for storage in waiting[1:]:
        total += storage.nbytes()
        if total > min(room, _BATCH_BYTES):
            break
        taken += 1
    return waiting[:taken]


def _move(storage: Any, tag: str) -> None:
    """In a region of the tag."""
    import torch

    nbytes, device = storage.nbytes(), storage.device
    stream = torch.cuda.current_stream(device)
    # The old memory's next user waits for the copy, whichever stream it belongs to.
    torch.empty(0, dtype=torch.uint8, device=device).set_(storage).record_stream(stream)
    try:
        storage.resize_(nbytes)  # new memory from the region's pool, and a copy
    except torch.OutOfMemoryError as error:
        free = device_memory(device.index)[0]
        failure = OutOfDeviceMemoryError(
            f"CUDA out of memory: moving {size_text(nbytes)} of {device} into tag {tag!r} needs "
            f"that much beside it for a moment, and {size_text(free)} is free; what was moved "
            "before stays there, the rest is as it was: free some memory and do the same again",
            tag=tag,
        )
        failure.needed, failure.free = nbytes, free
        raise failure from error
    if tag_of(storage) != tag:
        raise MemsaverError(
            f"torch {torch.__version__} did not take memory of tag {tag!r} for a storage that was "
            "to move there: its allocator is not the one that regions work with",
            tag=tag,
        )
