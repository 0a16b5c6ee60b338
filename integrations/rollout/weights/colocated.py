"""Weights for an engine on the same GPUs: memory for one bucket that the engine's ranks read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import memsaver
from memsaver.errors import OutOfDeviceMemoryError

from ...engine.interface import Layout
from .buckets import Bucket
from .parts import copy_box
from .payloads import Receivers, flattened, is_unreceived, listed, opened, shared
from .sources import Source

__all__ = ["BucketMemory"]


class BucketMemory:
    """A context manager that owns this rank's memory for one bucket at a time.

    The memory is outside all regions, because pausable memory cannot be shared with other processes
    through CUDA IPC.

    Args:
        nbytes: the size of the largest bucket, in bytes.
        device: a CUDA device, or the host for memory that is shared between processes on this
            machine.
        is_common: whether the trainer's ranks write to each other's memory.

    Raises:
        OutOfDeviceMemoryError: too little memory is free.
    """

    def __init__(self, nbytes: int, device: Any, is_common: bool = False) -> None:
        import torch

        self._device = torch.device(device)
        self._is_common = is_common
        self._receivers = Receivers()  # the engine's ranks of the last bucket
        self._is_sent = False  # whether these ranks may have received the bucket's payload
        self._others: list[Any] = []  # the buckets of other ranks
        nbytes = max(nbytes, 1)  # an empty allocation cannot be shared
        if self._device.type != "cuda":
            self._memory: Any = torch.empty(nbytes, dtype=torch.uint8)
            with self._file_names():
                self._memory.share_memory_()
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
        if is_unreceived(error, self._is_sent):
            self._receivers.release()
        self._memory, self._others = None, []
        # After an error, the device may hang in a collective, and freeing would wait for it.
        if self._device.type == "cuda" and error is None:
            import torch

            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def write(self, bucket: Bucket, sources: Mapping[str, Source]) -> list[tuple[str, int, Any]]:
        """Queue the work that fills the memory.

        This is a collective call of the ranks that have parts of the tensors.

        Returns:
            For each tensor, its name, the offset of its first byte, and a view of the memory.
        """
        import torch

        views = []
        with torch.no_grad():
            for slot in bucket.slots:
                source = sources[slot.name]
                view = source.view_of(self._memory[slot.begin :])
                source.write(view)
                if source.part is not None:
                    # Other ranks' memory is mapped for this device only, so this device must copy.
                    for other in self._others:
                        copy_box(source.part.box, view, source.view_of(other[slot.begin :]))
                views.append((slot.name, slot.begin, view))
        return views

    def shared(self, count: int) -> list[str]:
        """Return `count` serialized handles to the memory.

        Each handle is for one other rank, which passes it to `open`.

        Torch expects exactly one receiver for each handle. With a second receiver, torch could free
        the memory while one of the two is still using it.
        """
        with self._file_names():
            return [shared(self._memory) for _ in range(count)]

    def open(self, texts: Sequence[str]) -> None:
        """Open the buckets of other ranks, to which this rank writes its parts of tensors."""
        self._others = [opened(text, self._device) for text in texts]

    def close_others(self) -> None:
        """Close the buckets of other ranks."""
        self._others = []

    def settle(self) -> None:
        """Wait for the queued work, but not for the copies of a pause on other streams."""
        if self._device.type == "cuda":
            import torch

            for device in {self._device, *(other.device for other in self._others)}:
                torch.cuda.current_stream(device).synchronize()

    def payload(self, views: list[tuple[str, int, Any]], layout: Layout) -> str:
        """Return the tensors' serialized handles as text for the engine's rank on this device.

        Args:
            views: see `write`.
            layout: see `SharedTensors`.
        """
        self._receivers, self._is_sent = Receivers(), False
        with self._file_names():
            if layout == "engine":
                return listed(views, self._receivers)
            _, begin, last = views[-1]
            end = begin + last.numel() * last.element_size()
            return flattened(self._memory[:end], views, self._receivers)

    def sending(self) -> None:
        """Record that from now on the engine might receive the payload.

        Before this call, a failure frees the memory without waiting for a receiver to close it.
        """
        self._is_sent = True

    @contextlib.contextmanager
    def _file_names(self) -> Iterator[None]:
        """Share host memory through file names during the block.

        Ranks without a common ancestor process cannot exchange file descriptors.
        """
        import torch.multiprocessing as mp

        before = mp.get_sharing_strategy()
        if self._device.type == "cpu" and self._is_common:
            mp.set_sharing_strategy("file_system")
        try:
            yield
        finally:
            mp.set_sharing_strategy(before)
