"""SGLang's cache of image embeddings, in scheduler processes."""

from __future__ import annotations

import sys

__all__ = ["clear"]

# The modules that contain the cache, in 0.5.23 and in earlier versions.
_MODULES = ("sglang.srt.managers.mm_schedule", "sglang.srt.managers.mm_utils")


def clear() -> None:
    """Empty the cache, if the model has one.

    SGLang's flush does not remove the embeddings, although new weights make them invalid. Requests
    in flight compute their embeddings again.
    """
    for name in _MODULES:
        cache = getattr(sys.modules.get(name), "embedding_cache", None)
        if cache is not None:
            cache.clear()
