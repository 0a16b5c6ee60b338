"""Weights for an engine on the same GPUs: memory for one bucket, which the engine's ranks read."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import memsaver
from memsaver.errors import OutOfDeviceMemoryError

from ...engine.interface import Layout
from .buckets import Bucket
from .payloads import flattened, listed
from .sources import Source

__all__ = ["BucketMemory"]


class BucketMemory:
    """Memory on this rank for one bucket at a time; a context manager that releases it.

    The memory is outside of all regions, because memory that can be paused cannot be shared with
    other processes through CUDA IPC.

    Args:
        nbytes: the bytes of the largest bucket.
        device: a CUDA device; or the host, for shared memory of this machine.

    Raises:
        OutOfDeviceMemoryError: there is too little free memory.
    """

    def __init__(self, nbytes: int, device: Any) -> None:
        import torch

        self._device = torch.device(device)
        nbytes = max(nbytes, 1)  # an empty allocation cannot be shared
        if self._device.type != "cuda":
            self._memory: Any = torch.empty(nbytes, dtype=torch.uint8).share_memory_()
            return
        try:
            with memsaver.disabled():
                self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.cuda.OutOfMemoryError as failed:
            error = OutOfDeviceMemoryError(
                f"no room for a bucket of {nbytes} bytes on {self._device}: make buckets smaller "
                "(`bucket_bytes`), or free some of the trainer's memory first"
            )
            error.needed = nbytes
            raise error from failed

    def __enter__(self) -> BucketMemory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._memory = None
        # After an error the device may hang in a collective, and freeing would wait for it.
        if self._device.type == "cuda" and error is None:
            import torch

            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def write(self, bucket: Bucket, sources: Mapping[str, Source]) -> list[tuple[str, int, Any]]:
        """Fill the memory. Collective over the ranks with parts of the tensors; queues its work.

        Returns:
            For each tensor its name, the offset of its first byte, and a view of the memory.
        """
        import torch

        views = []
        with torch.no_grad():
            for slot in bucket.slots:
                source = sources[slot.name]
                view = source.view_of(self._memory[slot.begin :])
                source.write(view)
                views.append((slot.name, slot.begin, view))
        return views

    def settle(self) -> None:
        """Wait for the queued work."""
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)

    def payload(self, views: list[tuple[str, int, Any]], layout: Layout) -> str:
        """Return the tensors' serialised handles, as text, for the engine's rank on this device.

        Args:
            views: see `write`.
            layout: see `SharedTensors`.
        """
        if layout == "engine":
            return listed(views)
        _, begin, last = views[-1]
        end = begin + last.numel() * last.element_size()
        return flattened(self._memory[:end], views)
