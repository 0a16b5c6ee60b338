"""Preserve state other than weights during sleeps, in versions of vLLM that lose it.

vLLM 0.33 creates LoRA's stacks of adapters in the pool `runtime`, whose contents every sleep keeps.
vLLM 0.33 also saves a draft model's buffers, just as it saves the model's buffers. Older versions
create the stacks in the pool of the weights, and save neither the stacks nor these buffers.
The adapters would therefore be zero after a wake-up from level 2, and because their manager counts
them as loaded, the engine would generate with the base model.

Since vLLM 0.32, the block tables and the constants of the attention backends are also in the pool
`runtime`. vLLM 0.26 to 0.28 create them in the pool of the KV cache, whose contents every sleep
discards. `keeps_cache_state` therefore replaces that pool with `runtime`, and only the functions
that allocate the tensors of the KV cache use the pool of the KV cache (`install_cache`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from memsaver._runtime.native import _C

from ..engine import hooking
from ..engine.host_copies import to_host
from ..engine.tags import KV_CACHE, WEIGHTS
from .allocator import RUNTIME, MemsaverAllocator

__all__ = [
    "CACHE_MODULES",
    "LORA",
    "install_cache",
    "install_lora",
    "keeps_cache_state",
    "restores_draft",
    "saves_draft",
]

LORA = "vllm.v1.worker.lora_model_runner_mixin"
# The functions that allocate the KV cache up to vLLM 0.28, with their classes, by module.
_ALLOCATING = {
    "vllm.v1.worker.gpu_model_runner": ("GPUModelRunner", "_allocate_kv_cache_tensors"),
    "vllm.v1.worker.kv_connector_model_runner_mixin": (
        "KVConnectorModelRunnerMixin",
        "allocate_uniform_kv_caches",
    ),
    "vllm.v1.worker.gpu.attn_utils": ("", "_allocate_kv_cache"),
}
CACHE_MODULES = tuple(_ALLOCATING)
_OWN = "_sleep_saved_draft_buffers"  # vLLM's attribute of a worker, if it saves these buffers
_SAVED = "_sleep_memsaver_draft_buffers"  # memsaver's attribute; `wake_order` handles both
AllocatorOf = Callable[[], MemsaverAllocator | None]


def install_lora(module: ModuleType, allocator_of: AllocatorOf) -> None:
    """Create LoRA's stacks in the pool `runtime`, unless vLLM itself uses this pool. Idempotent.

    Raises:
        AttributeError: the module does not have the expected class and method.
    """
    owner: Any = module.LoRAModelRunnerMixin
    if not hasattr(module, "get_mem_allocator_instance"):
        hooking.around(owner, "load_lora_model", _in_pool(RUNTIME, allocator_of))


def install_cache(module: ModuleType, allocator_of: AllocatorOf) -> None:
    """Make a module of `CACHE_MODULES` allocate the KV cache's tensors in the pool `kv_cache`.

    The function does nothing if the module has no function that allocates the tensors, as in vLLM
    0.29 and later. Idempotent.
    """
    owner, name = _allocating(module)
    if hasattr(owner, name):
        # A cache allocated outside a region is only for profiling.
        hooking.around(owner, name, _in_pool(KV_CACHE, allocator_of, _C.region_depth))


def _in_pool(
    tag: str, allocator_of: AllocatorOf, applies: Callable[[], object] = lambda: True
) -> Callable[..., Any]:
    """Return an AROUND hook that opens a pool if memsaver is in use and `applies()` is true."""

    def hook(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        allocator = allocator_of()
        if allocator is None or not applies():
            return original(*arguments, **named)
        with allocator.use_memory_pool(tag):
            return original(*arguments, **named)

    return hook


def keeps_cache_state(
    pool: Callable[..., contextlib.AbstractContextManager[None]], allocator_of: AllocatorOf
) -> Callable[..., contextlib.AbstractContextManager[None]]:
    """Wrap a worker's method that opens a pool; replace the pool of the KV cache with `runtime`.

    The method still opens the pool of the KV cache unless every function that allocates the cache
    opens that pool itself.
    """

    @functools.wraps(pool)
    def call(worker: Any, tag: str) -> contextlib.AbstractContextManager[None]:
        found, allocator = pool(worker, tag), allocator_of()
        if allocator is None or tag != KV_CACHE or isinstance(found, contextlib.nullcontext):
            return found
        return allocator.use_memory_pool(RUNTIME) if _opens_pool(worker) else found

    return call


def _opens_pool(worker: Any) -> bool:
    """Return whether all imported functions that allocate the worker's KV cache are hooked."""
    runner = type(getattr(worker, "model_runner", None))
    functions = []
    for module in [sys.modules[name] for name in CACHE_MODULES if name in sys.modules]:
        owner, name = _allocating(module)
        if isinstance(owner, type) and issubclass(runner, owner):
            owner = runner  # a class that may have its own function
        functions.append(getattr(owner, name, None))
    return bool(functions) and all(hasattr(one, hooking.INSTALLED) for one in functions)


def _allocating(module: ModuleType) -> tuple[Any, str]:
    """Return the owner and the name of the function in a module that allocates the KV cache."""
    owner, name = _ALLOCATING[module.__name__]
    return (getattr(module, owner, None) if owner else module), name


def saves_draft(sleep: Callable[..., None], allocator_of: AllocatorOf) -> Callable[..., None]:
    """Wrap a worker's `sleep` so that it also saves the draft model's buffers at level 2."""

    @functools.wraps(sleep)
    def call(worker: Any, level: int = 1) -> None:
        draft = _draft(worker) if level == 2 and allocator_of() is not None else None
        if draft is not None:
            saved = {name: to_host(buffer) for name, buffer in draft.named_buffers()}
            setattr(worker, _SAVED, saved)
        sleep(worker, level)

    return call


def restores_draft(wake_up: Callable[..., None]) -> Callable[..., None]:
    """Wrap a worker's `wake_up` to restore the draft model's saved buffers with the weights."""

    @functools.wraps(wake_up)
    def call(worker: Any, tags: list[str] | None = None) -> None:
        wake_up(worker, tags)
        saved = getattr(worker, _SAVED, {})
        draft = _draft(worker) if saved and (tags is None or WEIGHTS in tags) else None
        if draft is None:
            return
        for name, buffer in draft.named_buffers():
            if name in saved:
                buffer.data.copy_(saved[name])
        setattr(worker, _SAVED, {})

    return call


def _draft(worker: Any) -> Any:
    """Return the worker's draft model; None if there is none, or if vLLM saves its buffers."""
    if hasattr(worker, _OWN) or not hasattr(worker, "get_draft_model"):
        return None
    return worker.get_draft_model()
