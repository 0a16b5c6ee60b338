"""Where a storage lies: in memory that may be moved, in a tag, or in somebody's pool."""

from __future__ import annotations

from typing import Any

from memsaver.native import _C
from memsaver.torch_mode import torch_pools

__all__ = ["Places", "tag_of"]


def tag_of(storage: Any) -> str | None:
    """The tag that a storage's memory belongs to, if any. In any state of the tag."""
    found = _C.locate(storage.data_ptr())
    return found[0] if found is not None else None


class Places:
    """Whose the memory of storages is, as it was when this was made."""

    def __init__(self) -> None:
        pools = torch_pools(required=False)
        self._private = pools.private_ranges() if pools is not None else []

    def obstacle(self, storage: Any, tag: str) -> str | None:
        """Why a storage that is not in `tag` must stay where it is; None where it need not."""
        other = tag_of(storage)
        if other is not None and other != tag:
            return f"lies in tag {other!r} already: pause and resume that one"
        address = storage.data_ptr()
        if any(start <= address < start + nbytes for start, nbytes in self._private):
            return (
                "lies in a memory pool of its own, such as that of a CUDA graph, which knows its "
                "address: make it outside, or capture after this call"
            )
        if storage.device.type == "cuda" and not storage.resizable():
            return "lies in memory that is not torch's, such as another process's: copy it first"
        return None
