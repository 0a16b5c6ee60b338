"""Let SGLang receive tensors of a trainer's shareable regions.

SGLang's unpickler of tensors rejects all functions that are not on its list. memsaver adds its
functions that map memory of a shareable region, and no others.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from memsaver._memory.sharing.importing import rebuild, rebuild_named

__all__ = ["MODULE", "install"]

MODULE = "sglang.srt.utils.common"
_CLASS = "SafeUnpickler"  # versions without it unpickle everything
_FUNCTIONS = {(known.__module__, known.__name__): known for known in (rebuild, rebuild_named)}


def install(module: ModuleType) -> None:
    """Extend the unpickler of the module, if it has one. Idempotent."""
    owner: Any = getattr(module, _CLASS, None)
    original = getattr(owner, "find_class", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def find_class(self: Any, module: str, name: str) -> Any:
        return _FUNCTIONS.get((module, name)) or original(self, module, name)

    owner.find_class = find_class
