"""Determine where storages are located: in movable memory, a tag, or a private pool."""

from __future__ import annotations

from typing import Any

from memsaver._memory.torch_mode import torch_pools
from memsaver._runtime.native import _C

__all__ = ["Places", "tag_of"]


def tag_of(storage: Any) -> str | None:
    """Return the tag of a storage's memory, whatever its state; None if the memory has no tag."""
    found = _C.locate(storage.data_ptr())
    return found[0] if found is not None else None


class Places:
    """Determines whether storages can be moved, given torch's private pools at construction."""

    def __init__(self) -> None:
        pools = torch_pools(required=False)
        self._private = pools.private_ranges() if pools is not None else []

    def obstacle(self, storage: Any, tag: str) -> str | None:
        """Return the reason why a storage cannot be moved into `tag`; None if it is movable."""
        other = tag_of(storage)
        if other is not None and other != tag:
            return f"is already in tag {other!r}: pause and resume that tag instead"
        address = storage.data_ptr()
        if any(start <= address < start + nbytes for start, nbytes in self._private):
            return (
                "is in a private memory pool, such as a CUDA graph's, and the graph uses its "
                "address: create it outside the pool, or capture the graph after this call"
            )
        if storage.device.type == "cuda" and not storage.resizable():
            return "is in memory that is not torch's, such as another process's: copy it first"
        return None
