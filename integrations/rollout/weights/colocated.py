"""Weights to an engine on the same GPUs: one bucket of memory, which its ranks read."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import memsaver
from memsaver.errors import OutOfDeviceMemoryError
from memsaver.integrations.rollout.weights.buckets import Bucket
from memsaver.integrations.rollout.weights.payloads import flattened, listed
from memsaver.integrations.rollout.weights.sources import Source

__all__ = ["BucketMemory"]


class BucketMemory:
    """Memory for one bucket after the other, on this rank; a context manager that gives it back.

    It lies outside of regions, whatever region is open: memory that can be paused cannot be shared
    with other processes by CUDA IPC.

    Args:
        nbytes: of the largest bucket.
        device: a CUDA device, or the host, whose memory is shared with other processes of this
            machine then.

    Raises:
        OutOfDeviceMemoryError: there is no room for it.
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
        """Fill it. Collective over the ranks that have parts of the tensors; queues its work.

        Returns:
            Names, where each tensor begins, and the tensors as views of the memory.
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
        """Wait until what was queued is done."""
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)

    def payload(self, views: list[tuple[str, int, Any]], load_format: str) -> str:
        """What the engine's rank on this device gets, to open the tensors.

        Args:
            views: see `write`.
            load_format: "flattened_bucket" or "direct".
        """
        if load_format == "direct":
            return str(listed(views))
        _, begin, last = views[-1]
        end = begin + last.numel() * last.element_size()
        return str(flattened(self._memory[:end], views))
