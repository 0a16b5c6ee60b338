"""Releases an idle engine's memory after a timeout, in SGLang's scheduler processes.

Only the rank that receives requests from the tokenizer manager measures the idle time. This rank
adds its own message to the received requests before SGLang broadcasts them, so all ranks release
memory at the same position in their sequence of requests. SGLang's hook for this purpose is the
input blocker, which it calls after receiving requests and before broadcasting them. With several
data-parallel schedulers, each scheduler releases its memory independently. With data-parallel
attention, the first scheduler decides for all schedulers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..engine.idle import IdleTimer
from ..engine.tags import GRAPH, KV_CACHE, WEIGHTS
from . import settings
from .places import LOCAL_CONTROL, effective_arguments, has_local_control, parallel_of
from .protocol import IDLE, TOUCH, is_health_check
from .updaters import updater_of

__all__ = ["IdleRelease", "IdleSleep", "install", "remove", "with_handler"]

# Requests that do not postpone a release, because monitoring sends them continually.
_QUERIES = ("GetInternalStateReq", "GetLoadsReqInput")
_LOOK_SECONDS = 0.1
_BLOCKER = "input_blocker"  # an attribute of a scheduler
_logger = logging.getLogger("memsaver.sglang")


@dataclass(frozen=True)
class IdleRelease:
    """A request that an idle scheduler's first rank sends to all of the scheduler's ranks.

    Attributes:
        tags: the tags to release.
    """

    tags: tuple[str, ...]


def install(result: Any, scheduler: Any) -> Any:
    """Make a scheduler release its memory when idle, if the settings request it.

    Called after `Scheduler.init_watch_dog_memory_saver_input_blocker`.
    """
    try:
        seconds = settings.policy_of(scheduler).sleep_after
        if seconds and scheduler.memory_saver_adapter.enabled:
            if has_local_control(scheduler):
                _logger.error(
                    "memsaver does not release the memory of an idle engine with SGLang's option "
                    "%s: turn the option off",
                    LOCAL_CONTROL,
                )
                return result
            blocker = getattr(scheduler, _BLOCKER)
            setattr(scheduler, _BLOCKER, IdleSleep(scheduler, seconds, blocker))
    except Exception as error:
        _logger.error(
            "memsaver cannot release the memory of an idle engine in this version of SGLang: %s: "
            "%s",
            type(error).__name__,
            error,
        )
    return result


def remove(scheduler: Any) -> None:
    """Undo `install`. Without a guard, the first request after a release would crash the engine."""
    blocker = getattr(scheduler, _BLOCKER, None)
    if isinstance(blocker, IdleSleep):
        setattr(scheduler, _BLOCKER, blocker.inner)


class IdleSleep:
    """Adds an `IdleRelease` to the received requests after a period without requests.

    Attributes:
        inner: SGLang's own input blocker, or None.

    Args:
        scheduler: the scheduler.
        seconds: the length of the period without requests.
        inner: SGLang's own input blocker, or None.
        clock: a function that returns the time in seconds.
    """

    def __init__(
        self,
        scheduler: Any,
        seconds: float,
        inner: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._timer = IdleTimer(seconds, clock)
        self.inner = inner
        self._clock = clock
        self._look_at = 0.0
        self._is_working = False  # on requests other than monitoring requests
        kept = getattr(effective_arguments(scheduler), "enable_weights_cpu_backup", False)
        graphs = settings.graphs_are_pausable()
        self._tags = (KV_CACHE, *([WEIGHTS] if kept else []), *([GRAPH] if graphs else []))
        self._is_first_stage = _stage_of(scheduler) == 0

    def handle(self, requests: list[Any] | None) -> list[Any] | None:
        """Return the requests to broadcast. `requests` is None on ranks without requests."""
        if self.inner is not None:
            requests = self.inner.handle(requests)
        if requests is None or not self._is_first_stage:
            return requests
        now = self._clock()
        if any(not _is_monitoring(request) for request in requests):
            self._timer.restart()
            self._is_working = True
        elif now >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            if self._is_due():
                self._timer.restart()  # a failed release is retried after the same period
                return [*requests, IdleRelease(self._tags)]
        return requests

    def _is_due(self) -> bool:
        scheduler = self._scheduler
        if self._is_working:  # The scheduler may have been in a long call until now.
            self._timer.restart()
        if getattr(scheduler, "_engine_paused", False) or not scheduler.is_fully_idle():
            return False
        self._is_working = False
        if set(self._tags) <= set(updater_of(scheduler).offload_tags):
            self._timer.restart()  # the memory is already released
        return not self._timer.left


def with_handler(scheduler: Any, dispatcher: Any) -> Any:
    """Return the dispatcher with an added handler for `IdleRelease` that sends no reply."""
    if not isinstance(getattr(scheduler, _BLOCKER, None), IdleSleep):
        return dispatcher

    def handle(request: IdleRelease) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        _logger.info("the engine is idle: releasing %s", ", ".join(request.tags))
        release = ReleaseMemoryOccupationReqInput(tags=list(request.tags), rid=IDLE)
        updater_of(scheduler).release_memory_occupation(release)

    dispatcher += type(dispatcher)([(IdleRelease, handle)])
    return dispatcher


def _is_monitoring(request: Any) -> bool:
    if getattr(request, "rid", None) == TOUCH:
        return False
    return is_health_check(request) or type(request).__name__ in _QUERIES


def _stage_of(scheduler: Any) -> int:
    """Return the index of a scheduler's pipeline stage."""
    return int(getattr(parallel_of(scheduler), "pp_rank", 0) or 0)
