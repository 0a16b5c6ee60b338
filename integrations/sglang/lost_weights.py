"""Whether the contents of a scheduler's released weights are lost."""

from __future__ import annotations

from typing import Any

from .updaters import scheduler_of

__all__ = ["are_lost", "end_update", "lose", "regain"]

_ATTRIBUTE = "_memsaver_lost_weights"  # of a scheduler


def are_lost(scheduler: Any) -> bool:
    """Return whether the weights were released without their contents, and not resumed since."""
    return bool(getattr(scheduler, _ATTRIBUTE, False))


def lose(updater: Any) -> None:
    """Record that the contents of the weights, which are released, are lost."""
    setattr(scheduler_of(updater), _ATTRIBUTE, True)
    end_update(updater)


def regain(updater: Any) -> None:
    """Record that the weights are mapped: the caller has to load lost contents."""
    setattr(scheduler_of(updater), _ATTRIBUTE, False)


def end_update(updater: Any) -> None:
    """End an update session (SGLang 0.5.21), because it failed or what it loaded is lost.

    SGLang then rejects the session's further requests.
    """
    if getattr(updater, "_session", None) is not None:
        updater._session = None
