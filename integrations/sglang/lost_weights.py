"""Records whether the contents of a scheduler's weights are lost."""

from __future__ import annotations

from typing import Any

from ..engine.tags import KV_CACHE, WEIGHTS
from .updaters import scheduler_of

__all__ = ["are_lost", "end_update", "loaded", "lose", "resumed"]

_ATTRIBUTE = "_memsaver_lost_weights"  # of a scheduler
_DISK = "UpdateWeightFromDiskReqInput"  # replaces all weights


def are_lost(scheduler: Any) -> bool:
    """Return whether the weights were released or resumed without their contents.

    After an update of all weights or a resume of all memory, returns False: the caller that resumes
    the last memory is responsible for the contents.
    """
    return bool(getattr(scheduler, _ATTRIBUTE, False))


def lose(updater: Any) -> None:
    """Record that the contents of the released weights are lost."""
    setattr(scheduler_of(updater), _ATTRIBUTE, True)
    end_update(updater)


def resumed(updater: Any, without_contents: bool) -> None:
    """Record a resume.

    Args:
        updater: the object with SGLang's handlers.
        without_contents: whether the weights were mapped without their contents.
    """
    scheduler = scheduler_of(updater)
    if updater.offload_tags.isdisjoint((WEIGHTS, KV_CACHE)):
        setattr(scheduler, _ATTRIBUTE, False)
    elif without_contents:
        setattr(scheduler, _ATTRIBUTE, True)


def loaded(updater: Any, request: Any) -> None:
    """Record that a request loaded weights.

    The last load of an update flushes the prefix cache, which the old weights computed.
    """
    if getattr(request, "flush_cache", False) or type(request).__name__ == _DISK:
        setattr(scheduler_of(updater), _ATTRIBUTE, False)


def end_update(updater: Any) -> None:
    """End an update session (SGLang 0.5.21), because it failed or the loaded weights are lost.

    SGLang then rejects all later requests of the session.
    """
    if getattr(updater, "_session", None) is not None:
        updater._session = None
