"""Weights for an engine on the same GPUs: the trainer's own tensors, which the engine's ranks map.

The trainer's tensors are in shareable regions. Their tags cannot be paused before the engine's
ranks have deleted their tensors, which they do before they answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...engine.interface import Layout
from .buckets import Bucket
from .payloads import mapped
from .sources import Source

__all__ = ["RegionTensors"]


class RegionTensors:
    """The tensors of this rank, in their own memory. Has the methods of `BucketMemory`.

    Args:
        device: the tensors' device.
    """

    def __init__(self, device: Any) -> None:
        self._device = device

    def write(self, bucket: Bucket, sources: Mapping[str, Source]) -> list[tuple[str, int, Any]]:
        """Return each tensor's name, an offset of 0, and the tensor."""
        return [(slot.name, slot.begin, sources[slot.name].local) for slot in bucket.slots]

    def settle(self) -> None:
        """Wait for the current stream's work, which may write the tensors."""
        if self._device.type == "cuda":
            import torch

            torch.cuda.current_stream(self._device).synchronize()

    def payload(self, views: list[tuple[str, int, Any]], layout: Layout) -> str:
        """Return the tensors' places as text. `layout` makes no difference."""
        return mapped([(name, view) for name, _, view in views])

    def sending(self) -> None:
        """Do nothing: memsaver keeps the memory as long as a receiver may use it."""
