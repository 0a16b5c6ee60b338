"""Weights for an engine that uses the same GPUs and maps the trainer's own tensors.

The trainer's tensors are in shareable regions. A pause of the tensors' tags waits until the
engine's ranks have deleted the mapped tensors. The ranks delete the tensors before they answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from memsaver._memory.sharing.sent_storages import cancel

from ...engine.interface import Layout
from .buckets import Bucket
from .payloads import is_unreceived, mapped
from .sources import Source

__all__ = ["RegionTensors"]


class RegionTensors:
    """A context manager for tensors that this rank sends without a copy. See `BucketMemory`.

    memsaver keeps the memory of a payload for its receiver. If the update fails and no receiver
    will open the payload, the memory is released when the context manager exits.

    Args:
        device: the tensors' device.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._tokens: list[int] = []  # of the payload
        self._is_sent = False  # whether the engine's rank may have received the payload

    def __enter__(self) -> RegionTensors:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if is_unreceived(error, self._is_sent):
            cancel(self._tokens)

    def write(self, bucket: Bucket, sources: Mapping[str, Source]) -> list[tuple[str, int, Any]]:
        """Return each tensor's name, an offset of 0, and the tensor."""
        return [(slot.name, slot.begin, sources[slot.name].whole) for slot in bucket.slots]

    def settle(self) -> None:
        """Wait for the current stream's work, which might write to the tensors."""
        if self._device.type == "cuda":
            import torch

            torch.cuda.current_stream(self._device).synchronize()

    def payload(self, views: list[tuple[str, int, Any]], layout: Layout) -> str:
        """Return the locations of the tensors as text. `layout` is ignored."""
        return mapped([(name, view) for name, _, view in views], self._tokens)

    def sending(self) -> None:
        """Record that from now on the engine might receive the payload."""
        self._is_sent = True
