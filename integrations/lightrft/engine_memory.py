"""The sleep and the wake-up of a LightRFT strategy's SGLang engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from memsaver.errors import ConfigError, InvalidStateError

from ..engine.sleep import EngineController
from ..engine.status import Status
from ..engine.tags import GRAPH, KV_CACHE, WEIGHTS
from .ranks import on_every_rank

__all__ = ["WEIGHTS_POLICIES", "EngineMemory"]

WEIGHTS_POLICIES = ("keep", "backup", "resend")
_AGAIN = "the other ranks' engines succeeded; the call may be repeated, and skips these engines"


class EngineMemory:
    """The engines of all ranks. Every rank makes the same calls, from one thread.

    In each tensor-parallel group, LightRFT creates an engine in rank 0's process, as the attribute
    `_engine` of an object that exists on every rank. The other ranks only participate in the
    collectives.

    Attributes:
        weights: the policy for the weights during a sleep, one of `WEIGHTS_POLICIES`.
    """

    def __init__(self, strategy: Any, weights: str, timeout: float) -> None:
        self.weights = weights
        self._strategy = strategy
        self._timeout = timeout
        self._controller: EngineController | None = None
        self._controlled: Any = None  # the controller's engine
        self._updating = False
        # True if this rank's engine may have lost its weights. Ranks may differ.
        self._lost_weights = False

    def controller(self) -> EngineController | None:
        """Return the controller of this rank's engine; None on a rank without an engine.

        Raises:
            EngineError: the engine cannot be reached.
        """
        rollout = self._strategy.inference_engine
        if rollout is None or getattr(rollout, "_tp_rank", 0) != 0:
            return None
        if self._controller is None or self._controlled is not rollout._engine:
            from ..sglang.sleep import SleepController  # SGLang's engine only: see `Adapted`

            self._controller = SleepController(rollout._engine, timeout=self._timeout)
            self._controlled = rollout._engine
        return self._controller

    def sleep(self) -> None:
        """Release the memory on every rank. Skips memory that is already released.

        Raises:
            RankError: the sleep failed on a rank.
            EngineBusyError, EngineTimeoutError, EngineError, MemsaverError: this is the only rank,
                and `SleepController.sleep` raised this error.
            ConfigError: this is the only rank, the policy is "backup", and the engine has no backup
                of the weights.
        """
        tags: Sequence[str] = (KV_CACHE, GRAPH)
        if self.weights != "keep":
            tags = (KV_CACHE, WEIGHTS, GRAPH)

        def work() -> None:
            controller = self.controller()
            if controller is None:
                return
            if self.weights == "backup":
                _check_backup(self._controlled)
            try:
                controller.sleep(tags, wait_idle=True, timeout=self._timeout)
            finally:  # a rejected sleep keeps the weights
                if self.weights == "resend" and _is_without_weights(controller):
                    self._lost_weights = True

        on_every_rank("the engine's sleep", work, _AGAIN)

    def wake_up(self) -> bool:
        """Map the memory again on every rank, or only the weights during an update of the weights.

        Returns:
            Whether the engine is awake afterwards; False during an update.

        Raises:
            InvalidStateError: the weights were released without a backup, and LightRFT has no actor
                from which to send the weights; nothing is done.
            RankError: the wake-up failed on a rank.
            OutOfDeviceMemoryError, EngineTimeoutError, EngineError, MemsaverError: this is the only
                rank, and `SleepController.wake_up` raised this error.
        """
        if self._updating:
            self._wake([WEIGHTS])
            return False
        if self.weights == "resend":
            lost = on_every_rank("the state of the weights", lambda: self._lost_weights, _AGAIN)
            if any(lost):
                self._resend()
        self._wake(None)
        return True

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """Limit wake-ups to the weights during the block, which replaces the weights."""
        self._updating = True
        try:
            yield
        finally:
            self._updating = False
        self._lost_weights = False

    def _resend(self) -> None:
        sender = getattr(self._strategy, "broadcast_manager", None)
        if sender is None:
            raise InvalidStateError(
                "the engine's weights were released without a backup, and LightRFT has no actor to "
                "send them from: call strategy.update_engine_weights(actor) before generating",
                tag=WEIGHTS,
            )
        self._wake([WEIGHTS])
        sender.broadcast_to_engine()
        self._strategy.sync_and_clear_cache()
        self._lost_weights = False

    def _wake(self, tags: Sequence[str] | None) -> None:
        def work() -> None:
            controller = self.controller()
            if controller is not None:
                controller.wake_up(tags, timeout=self._timeout)

        on_every_rank("the engine's wake-up", work, _AGAIN)


def _is_without_weights(controller: EngineController) -> bool:
    """Return whether an engine may have lost its weights' contents, because it has no backup."""
    gone = controller.released | controller.lost
    return controller.status is Status.UNKNOWN or WEIGHTS in gone


def _check_backup(engine: Any) -> None:
    """Raise `ConfigError` if SGLang keeps no backup of the weights."""
    arguments = getattr(engine, "server_args", None)
    if not getattr(arguments, "enable_weights_cpu_backup", False):
        raise ConfigError(
            "the engine was started without enable_weights_cpu_backup, so a sleep would lose its "
            'weights: start it with that option, or choose weights="resend" or "keep"',
            tag=WEIGHTS,
        )
