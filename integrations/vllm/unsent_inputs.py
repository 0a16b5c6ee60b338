"""Keep vLLM's caches of multi-modal inputs consistent if a rendered request is never sent.

The front end renders an image once, and records its hash in a cache. It then assumes that the
engine core has the image, and sends only the hash with later requests. If a request with an image
ends before it is sent, its image must be removed from the front end's cache. The engine core's
cache stays as it is, because requests that wait for a wake-up may rely on it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from ..engine.shared_query import retrieve

__all__ = ["forget", "tracked"]

_SHARED = "Shm"  # in the name of a cache in shared memory, which contains the inputs themselves


def tracked(
    engine: Any, prompt: Any, outputs: AsyncGenerator[Any, None], is_sent: Callable[[], bool]
) -> AsyncGenerator[Any, None]:
    """Return the outputs of an `AsyncLLM`'s request. If it is never sent, forget its inputs.

    Args:
        engine: the AsyncLLM.
        prompt: the request's prompt.
        outputs: the request's outputs.
        is_sent: a function that returns whether the request was sent.
    """
    return _tracked(engine, prompt, outputs, is_sent) if _hashes_of(prompt) else outputs


async def _tracked(
    engine: Any, prompt: Any, outputs: AsyncGenerator[Any, None], is_sent: Callable[[], bool]
) -> AsyncGenerator[Any, None]:
    def clear() -> None:  # on the renderer's thread, before it renders later requests
        asyncio.ensure_future(engine.renderer.clear_mm_cache_async()).add_done_callback(retrieve)

    try:
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output
    finally:
        if not is_sent():
            forget(engine, prompt, clear)


def forget(engine: Any, prompt: Any, clear: Callable[[], None]) -> None:
    """Remove the inputs of a prompt that was not sent from the front end's cache.

    Args:
        engine: the AsyncLLM or the LLMEngine.
        prompt: the prompt.
        clear: a function that clears the front end's cache, for versions of vLLM that cannot remove
            single inputs.
    """
    hashes = _hashes_of(prompt)
    if not hashes:
        return
    renderer = engine.renderer
    if hasattr(renderer, "queue_mm_cache_invalidations"):
        renderer.queue_mm_cache_invalidations(hashes)
    elif _SHARED not in type(renderer.mm_processor_cache).__name__:
        clear()


def _hashes_of(prompt: Any) -> list[str]:
    """Return the hashes of the inputs that a rendered prompt contains."""
    if isinstance(prompt, dict):
        items, hashes = prompt.get("mm_kwargs"), prompt.get("mm_hashes")
        if not items or not hashes:
            return []
        rows = [pair for kind in hashes for pair in zip(hashes[kind], items[kind], strict=False)]
        return [name for name, item in rows if item is not None]
    features = getattr(prompt, "mm_features", None) or ()
    return [one.mm_hash or one.identifier for one in features if one.data is not None]
