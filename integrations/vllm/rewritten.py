"""Wake up weights that are about to be rewritten, and restore only the model's buffers.

An update rewrites the model's parameters, but not the model's buffers, a draft model, or the
parameters in vLLM's `sleep_preserve_parameter_names`. Before such a wake-up, the buffers are read
from the backup. vLLM's worker then restores the buffers, as it does after a level 2 sleep. If there
is a draft model or a preserved parameter, the wake-up restores all contents.
"""

from __future__ import annotations

from typing import Any

import memsaver
from memsaver._runtime.native import _C
from memsaver._transitions.parts import names_of

from ..engine.tags import WEIGHTS
from .allocator import MemsaverAllocator
from .logs import logger

__all__ = ["has_draft", "save_buffers"]

_SAVED = "_sleep_saved_buffers"  # an attribute of vLLM's worker
_PRESERVED = "sleep_preserve_parameter_names"  # since vLLM 0.31


def has_draft(worker: Any) -> bool:
    """Return whether the worker might have a draft model; updates do not rewrite it."""
    if hasattr(worker, "get_draft_model"):
        return worker.get_draft_model() is not None
    return getattr(worker.vllm_config, "speculative_config", None) is not None


def save_buffers(worker: Any, allocator: MemsaverAllocator) -> bool:
    """Save the model's buffers for a wake-up that does not restore the released weights.

    The function never raises an exception, because the other ranks would then wait for this rank.

    Returns:
        Whether the next wake-up of the weights needs no other contents of the backup. False if an
        update does not rewrite all parameters, if the last release discarded the contents, or if
        the buffers cannot be read, for example because the backup is on disk.
    """
    try:
        preserved: Any = getattr(worker.model_config, _PRESERVED, None)
        restores = hasattr(worker, _SAVED) and not allocator.discards(WEIGHTS)
        if not restores or has_draft(worker) or preserved:
            return False
        setattr(worker, _SAVED, _saved_buffers(worker.model_runner.model))
    except Exception as error:
        logger.info("a wake-up restores weights that are about to be rewritten: %s", error)
        return False
    return True


def _saved_buffers(model: Any) -> dict[str, Any]:
    """Return copies of a model's released buffers from the backup of the weights."""
    names = names_of(WEIGHTS)
    found = {}
    for name, buffer in model.named_buffers():
        place = _C.locate(buffer.data_ptr()) if buffer.numel() else None
        if place is not None and place[0] in names:
            found[name] = memsaver.backup_view(buffer).clone()
    return found
