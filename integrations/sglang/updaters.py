"""Access to the object that has SGLang's release and resume handlers and their state.

This object is the scheduler's weight updater or, in older versions such as 0.5.12, the scheduler
itself, through a mixin. memsaver's hooks expect an updater, and wrap such a scheduler as an
updater.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["SchedulerAsUpdater", "of_scheduler", "resume_of", "scheduler_of", "updater_of"]

_HANDLER = "release_memory_occupation"


class SchedulerAsUpdater:
    """A weight updater with the handlers and attributes of a scheduler.

    Attributes:
        scheduler: the scheduler.
    """

    scheduler: Any

    def __init__(self, scheduler: Any) -> None:
        object.__setattr__(self, "scheduler", scheduler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.scheduler, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.scheduler, name)


def updater_of(scheduler: Any) -> Any:
    """Return a scheduler's updater. Raises `AttributeError` if the scheduler has no updater."""
    if hasattr(scheduler, "weight_updater") or not hasattr(scheduler, _HANDLER):
        return scheduler.weight_updater
    return SchedulerAsUpdater(scheduler)


def scheduler_of(updater: Any) -> Any:
    """Return an updater's scheduler, or None.

    The updater of SGLang 0.5.13 does not refer to the scheduler, only to some of its bound methods.
    """
    scheduler = getattr(updater, "scheduler", None)
    if scheduler is None:
        scheduler = getattr(getattr(updater, "is_fully_idle", None), "__self__", None)
    return scheduler


def resume_of(updater: Any) -> Callable[..., Any]:
    """Return SGLang's resume handler as a function of the updater."""
    owner = updater.scheduler if isinstance(updater, SchedulerAsUpdater) else updater
    handler: Callable[..., Any] = type(owner).resume_memory_occupation
    return handler


def of_scheduler(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Adapt a hook for an updater's handler to the same handler of a scheduler."""

    def call(original: Callable[..., Any], owner: Any, request: Any) -> Any:
        # memsaver's own calls of the handlers pass such an updater.
        known = isinstance(owner, SchedulerAsUpdater)
        return hook(original, owner if known else SchedulerAsUpdater(owner), request)

    return call
