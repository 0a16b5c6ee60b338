"""Preserves a draft model's weights (for speculative decoding) during a sleep.

A trainer sends the main model's weights after each sleep, but usually not the draft model's. SGLang
up to 0.5.23 loads both models into the same tag, and preserves the draft model's weights only if an
option requests it. memsaver always backs up the draft model's weights, which form a part of the tag
with its own policy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from ..engine.tags import WEIGHTS

__all__ = ["DRAFTER", "drop_copy", "is_loaded", "load", "placed"]

# A tag for draft models in modified versions of SGLang. memsaver's tag WEIGHTS includes it.
DRAFTER = "weights_drafter"
# In versions after 0.5.23, the updater's copy of the draft model's weights during a release.
_COPY = "stashed_draft_model_state"
_is_loading: ContextVar[bool] = ContextVar("memsaver_loads_draft", default=False)
_kept: list[bool] = []  # not empty if this process has loaded a draft model


def load(original: Callable[..., Any], runner: Any) -> Any:
    """Wrap `ModelRunner.load_model`: mark the regions that a draft model's load creates."""
    if not getattr(runner, "is_draft_worker", False):
        return original(runner)
    before = _is_loading.set(True)
    try:
        result = original(runner)
    finally:
        _is_loading.reset(before)
    _kept.append(True)
    return result


def is_loaded() -> bool:
    """Return whether this process has loaded a draft model."""
    return bool(_kept)


def placed(tag: str, keep: bool) -> tuple[str, bool]:
    """Return a region's tag and backup, given the tag and backup that SGLang requests."""
    if tag == DRAFTER:
        return WEIGHTS, True
    return tag, keep or (tag == WEIGHTS and _is_loading.get())


def drop_copy(updater: Any) -> None:
    """Delete the copy of a draft model's weights that SGLang makes at a release.

    The copy may occupy device memory, and is not needed, because memsaver backs up these weights.
    Without the copy, SGLang's resume handler restores nothing.
    """
    copy = getattr(updater, _COPY, None) if _kept else None
    if copy is None:
        return
    is_on_device = any(tensor.is_cuda for _, tensor in copy["tensors"])
    del copy
    setattr(updater, _COPY, None)
    if is_on_device:
        import torch

        torch.cuda.empty_cache()
