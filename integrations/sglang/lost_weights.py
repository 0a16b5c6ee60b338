"""Records whether the contents of a scheduler's weights are lost."""

from __future__ import annotations

from typing import Any

from ..engine.tags import KV_CACHE, WEIGHTS
from .protocol import INCOMPLETE
from .updaters import scheduler_of

__all__ = [
    "are_lost",
    "end_update",
    "loaded",
    "lose",
    "resumed",
    "session_ended",
    "session_of",
]

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

    The last load of an update flushes the prefix cache, which was computed with the old weights. In
    an update session (SGLang 0.5.21), the weights can be used only after the end of the session.
    """
    is_last = getattr(request, "flush_cache", False) or type(request).__name__ == _DISK
    if is_last and session_of(updater) is None and _includes_target(request):
        setattr(scheduler_of(updater), _ATTRIBUTE, False)


def session_of(updater: Any) -> Any:
    """Return the open update session (SGLang 0.5.21), or None."""
    return getattr(updater, "_session", None)


def session_ended(updater: Any, session: Any, request: Any) -> None:
    """Record that SGLang has ended a session at a client's request."""
    if _includes_target(session) and getattr(request, "rid", None) != INCOMPLETE:
        setattr(scheduler_of(updater), _ATTRIBUTE, False)


def _includes_target(chosen: Any) -> bool:
    """Return whether a request or a session selects more than the draft model."""
    return getattr(chosen, "selector", None) != "draft"


def end_update(updater: Any) -> None:
    """End an update session (SGLang 0.5.21), because it failed or the loaded weights are lost.

    SGLang then rejects all later requests of the session.
    """
    if session_of(updater) is not None:
        updater._session = None
