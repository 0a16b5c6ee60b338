"""`adapt`, and what it gives: the memory methods of LightRFT's strategy interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memsaver.errors import ConfigError
from memsaver.integrations.lightrft.engine import WEIGHTS_POLICIES, EngineMemory
from memsaver.integrations.lightrft.optimizers import OptimizerMemory
from memsaver.integrations.sglang import Status
from memsaver.native import check_tag
from memsaver.timeouts import check_timeout

__all__ = ["Adapted", "adapt"]

# The methods of a strategy that are replaced, and what else of it is used.
_METHODS = (
    "maybe_sleep_inference_engine",
    "wakeup_inference_engine",
    "update_engine_weights",
    "maybe_offload_optimizer",
    "maybe_load_optimizer",
    "save_ckpt",
    "load_ckpt",
)
_USED = ("args", "inference_engine", "inference_engine_status", "sync_and_clear_cache")


class Adapted:
    """A strategy's methods that are about memory; made by `adapt`.

    LightRFT calls them as the strategy's own. Every rank makes the same calls, from one thread.
    """

    def __init__(
        self, strategy: Any, engine: EngineMemory, optimizers: OptimizerMemory, offload: bool | None
    ) -> None:
        self._strategy = strategy
        self._engine = engine
        self._optimizers = optimizers
        self._offload = offload
        self._originals: dict[str, Callable[..., Any]] = {
            name: getattr(strategy, name) for name in _METHODS
        }

    @property
    def status(self) -> Status | None:
        """What of this rank's engine is there; None where this rank has none.

        The strategy's `inference_engine_status` is kept as LightRFT keeps it, and says `SLEEPED`
        until all is there.
        """
        controller = self._engine.controller() if self._is_ours() else None
        return controller.status if controller is not None else None

    def maybe_sleep_inference_engine(self) -> None:
        """Wait until the engine is idle, and give its memory back; if `args.enable_engine_sleep`.

        Raises:
            RankError: it failed on a rank, which is named; the call may be made again.
            EngineBusyError, EngineTimeoutError, EngineError, MemsaverError: the same, where there
                are no other ranks.
        """
        if not self._is_ours():
            self._originals["maybe_sleep_inference_engine"]()
        elif getattr(self._strategy.args, "enable_engine_sleep", False):
            self._note("SLEEPED")  # also after a failure: a wake-up sees to what sleeps
            self._engine.sleep()
            self._strategy.sync_and_clear_cache()

    def wakeup_inference_engine(self) -> None:
        """Have the engine's memory again. In an update of the weights: that of the weights.

        Raises:
            RankError: it failed on a rank, which is named: no memory, say, as a trainer still holds
                it. The engine lives, what could not be had sleeps on, and the call may be made
                again.
            OutOfDeviceMemoryError, EngineError, MemsaverError: the same, where there are no other
                ranks.
            InvalidStateError: the weights were released without a backup, and were not sent again.
        """
        if not self._is_ours():
            self._originals["wakeup_inference_engine"]()
        elif self._strategy.inference_engine_status.name != "WAKEUP":
            self._strategy.sync_and_clear_cache()
            if self._engine.wake_up():
                self._note("WAKEUP")

    def update_engine_weights(self, actor: Any) -> None:
        """LightRFT's, with the KV cache and the graphs left asleep where they are.

        So they take no memory while there are two copies of weights; the next generation wakes
        them. Errors are LightRFT's, and those of `wakeup_inference_engine`.
        """
        if not self._is_ours():
            self._originals["update_engine_weights"](actor)
            return
        with self._engine.update():
            self._originals["update_engine_weights"](actor)

    def maybe_offload_optimizer(self, optimizer: Any) -> Any:
        """Give the optimizer's memory back, with a backup on the host; if offloading is on.

        The first call moves it into a tag, for which a batch of tensors (512 MiB at most, or one
        larger tensor) exists twice for a moment. A step until `maybe_load_optimizer` is an error.

        Raises:
            RankError: it failed on a rank, and nothing is given back on any.
            ConfigError, OutOfHostMemoryError, MemsaverError: the same, where there are no other
                ranks.
        """
        if self._offloads():
            self._optimizers.pause(optimizer)
        return optimizer

    def maybe_load_optimizer(self, optimizer: Any, device: Any = None) -> Any:
        """Have the optimizer's memory again, at the addresses and on the device where it was.

        Raises:
            RankError: it failed on a rank, and it is given back on all, with its backup.
            OutOfDeviceMemoryError, MemsaverError: the same, where there are no other ranks.
        """
        if self._offloads():
            self._optimizers.resume(optimizer)
        return optimizer

    def save_ckpt(self, *args: Any, **kwargs: Any) -> Any:
        """LightRFT's, with the memory of all optimizers there meanwhile.

        Errors are LightRFT's, and those of `maybe_load_optimizer`.
        """
        with self._optimizers.there():
            return self._originals["save_ckpt"](*args, **kwargs)

    def load_ckpt(self, *args: Any, **kwargs: Any) -> Any:
        """As `save_ckpt`."""
        with self._optimizers.there():
            return self._originals["load_ckpt"](*args, **kwargs)

    def close(self) -> None:
        """Give the strategy its own methods back, and the optimizers their memory. A collective.

        The engine stays as it is: wake it first, if LightRFT is to go on with it.

        Raises:
            RankError, MemsaverError: an optimizer's memory could not be had; nothing has changed.
        """
        self._optimizers.close()
        for name in _METHODS:
            if vars(self._strategy).get(name) == getattr(self, name):
                delattr(self._strategy, name)

    def _is_ours(self) -> bool:
        """Whether there is an engine, and SGLang's."""
        strategy = self._strategy
        kind = getattr(strategy, "inference_engine_type", None)
        return strategy.inference_engine is not None and kind == "sglang"

    def _offloads(self) -> bool:
        if self._offload is not None:
            return self._offload
        return bool(getattr(self._strategy.args, "adam_offload", False))

    def _note(self, name: str) -> None:
        """Keep LightRFT's own status, an enumeration of LightRFT's."""
        strategy = self._strategy
        strategy.inference_engine_status = type(strategy.inference_engine_status)[name]


def adapt(
    strategy: Any,
    *,
    weights: str = "keep",
    offload_optimizer: bool | None = None,
    tag: str = "optimizer",
    timeout: float = 300.0,
) -> Adapted:
    """Make memsaver manage the memory of a LightRFT strategy. Call this on every rank.

    Call it before the strategy makes its engine (`setup_inference_engine`), and before the first
    training step. LightRFT keeps managing engines other than SGLang's.

    Args:
        strategy: the result of LightRFT's `get_strategy`. Its methods are replaced on this object.
        weights: the policy for the engine's weights in a sleep. "keep", LightRFT's own: the sleep
            releases only the KV cache and the graphs. "backup": it releases the weights too, and
            the wake-up restores them from the host; the engine must have been started with
            `enable_weights_cpu_backup`. "resend": it releases the weights without a backup, and
            LightRFT sends them from the actor when the engine wakes, unless it was just updated.
        offload_optimizer: whether `maybe_offload_optimizer` does anything. None follows LightRFT's
            `--adam_offload`. With DeepSpeed, which keeps the states on the host with that flag,
            None means True without the flag.
        tag: the tag of the first optimizer; later ones append a number.
        timeout: seconds for an engine's sleep or wake-up, including the wait for requests.

    Raises:
        ConfigError: `strategy` does not have this interface or is already adapted, the policy for
            the weights is unknown, or the tag or the timeout is invalid.
    """
    missing = [name for name in (*_METHODS, *_USED) if not hasattr(strategy, name)]
    if missing:
        raise ConfigError(
            f"{type(strategy).__name__} is not a strategy of LightRFT's as it is known here: it "
            f"has no {', '.join(missing)}"
        )
    if "maybe_offload_optimizer" in vars(strategy):
        raise ConfigError("this strategy is adapted already: close what adapt gave before")
    if weights not in WEIGHTS_POLICIES:
        raise ConfigError(f"weights cannot be {weights!r}: it is one of {WEIGHTS_POLICIES}")
    check_tag(tag)
    check_timeout(timeout)
    engine = EngineMemory(strategy, weights, timeout)
    adapted = Adapted(strategy, engine, OptimizerMemory(tag), offload_optimizer)
    for name in _METHODS:
        setattr(strategy, name, getattr(adapted, name))
    return adapted
