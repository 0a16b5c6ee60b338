"""`PayloadMemory`: the memory from which the tensors of a load are sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ...engine.errors import EngineDiedError
from ...engine.interface import Layout
from .buckets import Bucket
from .sources import Source

__all__ = ["PayloadMemory", "is_unreceived"]


class PayloadMemory(Protocol):
    """A rank's memory with the tensors of one load at a time, for the engine on the same GPU."""

    def write(self, bucket: Bucket, sources: Mapping[str, Source]) -> list[tuple[str, int, Any]]:
        """Prepare a load's tensors in the memory. Collective; `settle` waits for its work.

        Returns:
            For each tensor its name, the offset of its first byte in the payload's memory, and the
            tensor.
        """

    def settle(self) -> None:
        """Wait for the work that writes the tensors."""

    def payload(self, views: list[tuple[str, int, Any]], layout: Layout) -> str:
        """Return the tensors' serialised handles, as text, for the engine's rank on this device.

        Args:
            views: see `write`.
            layout: see `SharedTensors`.
        """

    def sending(self) -> None:
        """Note that the engine may receive the payload from now on."""


def is_unreceived(error: BaseException | None, is_sent: bool) -> bool:
    """Return whether no engine will read a payload, after an update that ended with `error`.

    Args:
        error: None after a success.
        is_sent: whether the engine may have received the payload.
    """
    return isinstance(error, EngineDiedError) or (error is not None and not is_sent)
