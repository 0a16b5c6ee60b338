"""Release an idle engine's memory in vLLM's engine core after a period without requests.

The engine core waits for requests in its input queue. `IdleSleep` limits this wait to the remaining
time. It then releases the memory on the waiting thread, so no request can arrive before the
release. With several data-parallel engine cores, each core releases its memory independently. The
exception is a model with experts: its engine cores run their steps together and do not release
their memory.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

from ..engine.idle import IdleTimer
from .calls import is_query
from .logs import logger

__all__ = ["IdleRelease", "IdleSleep"]

_LEVEL = 1  # the weights are saved
_QUEUE = "input_queue"  # an attribute of an engine core


class IdleRelease:
    """A message that an engine core sends to itself when its idle time has passed."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run


class IdleSleep:
    """Releases an engine core's memory after a period without requests.

    Args:
        core: the engine core.
        seconds: the length of the period.
        clock: a function that returns the time in seconds.
    """

    def __init__(
        self, core: Any, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._core = core
        self._timer = IdleTimer(seconds, clock)
        self._is_working = False

    @classmethod
    def of(cls, core: Any, seconds: float) -> IdleSleep | None:
        """Return an engine core's `IdleSleep`; None if an idle core keeps its memory."""
        if not seconds or not core.vllm_config.model_config.enable_sleep_mode:
            return None
        if not hasattr(core, _QUEUE):
            logger.error(
                "memsaver does not release the memory of an idle engine that runs in the process "
                "of its caller: set VLLM_ENABLE_V1_MULTIPROCESSING=1"
            )
            return None
        if hasattr(core, "dp_group"):
            logger.error(
                "memsaver does not release the memory of an idle data-parallel engine whose model "
                "has experts, because its ranks can only sleep together"
            )
            return None
        return cls(core, seconds)

    def wait_begins(self) -> None:
        """Record that the engine core is about to wait for requests. Called before each wait."""
        if self._is_working:
            self._is_working = False
            self._timer.restart()
        if not isinstance(getattr(self._core, _QUEUE), _BoundedQueue):
            setattr(self._core, _QUEUE, _BoundedQueue(getattr(self._core, _QUEUE), self))

    def received(self, kind: str, request: Any) -> None:
        """Record a client's request. Queries do not postpone a release.

        The period restarts when the request arrives, and again when the engine core has handled it
        and waits for the next one.
        """
        if kind == "ADD" or (kind == "UTILITY" and not is_query(request[2], request[3])):
            self._is_working = True
            self._timer.restart()

    def restart(self) -> None:
        """Restart the period."""
        self._timer.restart()

    @property
    def left(self) -> float | None:
        """The seconds until a release; None if the engine cannot release its memory now."""
        core = self._core
        is_paused = core.is_scheduler_paused() or core.model_executor.is_sleeping
        return None if is_paused or not core.is_running() else self._timer.left

    def release(self) -> None:
        """Release the memory if the engine is still idle. A failure is logged."""
        core = self._core
        if self.left is None or core.has_work():
            return
        self._timer.restart()  # a failed release is retried after the same period
        try:
            # Not `core.sleep`, because it clears the caches of multi-modal inputs, and the clients
            # keep the corresponding caches.
            if core.pause_scheduler("abort", False) is None and core.reset_prefix_cache():
                logger.info("the engine is idle: releasing its memory")
                core.model_executor.sleep(_LEVEL)
        except Exception as error:
            logger.warning("the idle engine keeps its memory: %s", error)
        finally:
            if not core.model_executor.is_sleeping:
                core.resume_scheduler()


class _BoundedQueue:
    """An engine core's input queue, in which a wait ends when memory is due to be released."""

    def __init__(self, inner: Any, idle: IdleSleep) -> None:
        self._inner = inner
        self._idle = idle

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the next request, or an `IdleRelease`."""
        left = self._idle.left if block and timeout is None else None
        if left is None:
            return self._inner.get(block, timeout)
        try:
            return self._inner.get(timeout=left) if left else self._inner.get_nowait()
        except queue.Empty:
            return IdleRelease(self._idle.release), None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
