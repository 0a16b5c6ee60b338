"""Weight updates of an engine with data-parallel replicas, in SGLang's tokenizer manager.

SGLang can send these requests to all replicas and wait for all replies, but rejects them if there
is more than one replica, because different schedulers would use the same payloads and ranks.
memsaver's hooks in the schedulers (`places`) assign separate payloads and ranks to each scheduler,
so the hooks of this module can send the requests to all replicas.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any

from .places import has_replicas

__all__ = ["join", "update"]


def join(name: str) -> Callable[..., Awaitable[Any]]:
    """Return a hook around a request to join or leave a group for weights."""

    async def send(manager: Any, obj: Any) -> Any:
        return _merged(await getattr(manager, f"{name}_communicator")(obj))

    return _to_all(send)


def update(name: str) -> Callable[..., Awaitable[Any]]:
    """Return a hook around a request that updates weights."""

    async def send(manager: Any, obj: Any) -> Any:
        if obj.abort_all_requests:
            manager.abort_request(abort_all=True)
        _normalise(obj)
        communicator = getattr(manager, f"{name}_communicator")
        results = None
        async with manager.is_pause_cond:  # so that generation stays paused during the update
            if manager.is_pause:
                results = await communicator(obj)
        if results is None:
            async with manager.model_update_lock.writer_lock:
                results = await communicator(obj)
        success, message = _merged(results)
        processor: Any = getattr(manager, "mm_processor", None)
        if success and obj.flush_cache and hasattr(processor, "clear_preprocess_cache"):
            processor.clear_preprocess_cache()  # since SGLang 0.5.23
        if success and obj.weight_version is not None:
            manager._update_weight_version_if_provided(obj.weight_version)
        return success, message

    return _to_all(send)


def _to_all(send: Callable[[Any, Any], Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a hook that calls `send` instead of SGLang's method if there are several replicas."""

    async def hook(
        original: Callable[..., Awaitable[Any]], manager: Any, obj: Any, *rest: Any
    ) -> Any:
        if not has_replicas(manager):
            return await original(manager, obj, *rest)
        manager.auto_create_handle_loop()
        return await send(manager, obj)

    return hook


def _merged(results: Any) -> tuple[bool, str]:
    return all(one.success for one in results), " | ".join(one.message for one in results)


def _normalise(obj: Any) -> None:
    """Convert payloads as SGLang's own method does, if this version converts them."""
    convert = getattr(
        sys.modules.get("sglang.srt.utils"), "normalize_serialized_named_tensor_payloads", None
    )
    if convert is not None and hasattr(obj, "serialized_named_tensors"):
        obj.serialized_named_tensors = convert(obj.serialized_named_tensors)
