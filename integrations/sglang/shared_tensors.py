"""Allows SGLang to receive tensors of a trainer's shareable regions.

SGLang's unpickler for tensors rejects all functions that are not on its allowlist. memsaver adds
only its own functions that map the memory of a shareable region.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from memsaver._memory.sharing.importing import rebuild, rebuild_named

from ..engine import hooking

__all__ = ["MODULE", "install"]

MODULE = "sglang.srt.utils.common"
_CLASS = "SafeUnpickler"  # versions without it unpickle any function
_FUNCTIONS = {(known.__module__, known.__name__): known for known in (rebuild, rebuild_named)}


def install(module: ModuleType) -> None:
    """Extend the module's unpickler, if the module has one. Idempotent."""
    owner: Any = getattr(module, _CLASS, None)
    if hasattr(owner, "find_class"):
        hooking.around(owner, "find_class", _find_class)


def _find_class(original: Callable[..., Any], self: Any, module: str, name: str) -> Any:
    return _FUNCTIONS.get((module, name)) or original(self, module, name)
