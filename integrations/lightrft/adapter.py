"""`adapt` and `Adapted`: the memory methods of LightRFT's strategy interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memsaver._runtime.native import check_tag
from memsaver._runtime.timeouts import check_timeout
from memsaver.errors import ConfigError

from ..engine.status import Status
from .engine_memory import WEIGHTS_POLICIES, EngineMemory
from .optimizers import OptimizerMemory

__all__ = ["Adapted", "adapt"]

# The strategy's methods that are replaced, and its other attributes that are used.
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
    """A strategy's memory methods, as returned by `adapt`.

    LightRFT calls these methods as methods of the strategy. Every rank makes the same calls, from
    one thread.
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
        """The status of this rank's engine; None on a rank without an engine.

        The strategy's own `inference_engine_status` is set as in LightRFT, and remains `SLEEPED`
        until all memory is mapped.
        """
        controller = self._engine.controller() if self._is_ours() else None
        return controller.status if controller is not None else None

    def maybe_sleep_inference_engine(self) -> None:
        """Once the engine is idle, release its memory, if `args.enable_engine_sleep` is set.

        Raises:
            RankError: the sleep failed on a rank; the message names the rank, and the call can be
                repeated.
            EngineBusyError, EngineTimeoutError, EngineError, MemsaverError: the sleep failed, and
                this is the only rank.
        """
        if not self._is_ours():
            self._originals["maybe_sleep_inference_engine"]()
        elif getattr(self._strategy.args, "enable_engine_sleep", False):
            self._note("SLEEPED")  # even after a failure: the wake-up finds the released tags
            self._engine.sleep()
            self._strategy.sync_and_clear_cache()

    def wakeup_inference_engine(self) -> None:
        """Map the engine's memory again; during an update of the weights, map only the weights.

        Raises:
            RankError: the wake-up failed on a rank, for example because a trainer still uses the
                memory; the message names the rank. The engine keeps running, the tags remain
                released, and the call can be repeated.
            OutOfDeviceMemoryError, EngineError, MemsaverError: the wake-up failed, and this is the
                only rank.
            InvalidStateError: the weights were released without a backup and have not been sent
                again.
        """
        if not self._is_ours():
            self._originals["wakeup_inference_engine"]()
        elif self._strategy.inference_engine_status.name != "WAKEUP":
            self._strategy.sync_and_clear_cache()
            if self._engine.wake_up():
                self._note("WAKEUP")

    def update_engine_weights(self, actor: Any) -> None:
        """Call LightRFT's method without waking the KV cache or the graphs.

        The KV cache and the graphs therefore use no memory while two copies of the weights exist.
        The next generation wakes the KV cache and the graphs. Raises LightRFT's errors, and the
        errors of `wakeup_inference_engine`.
        """
        if not self._is_ours():
            self._originals["update_engine_weights"](actor)
            return
        with self._engine.update():
            self._originals["update_engine_weights"](actor)

    def maybe_offload_optimizer(self, optimizer: Any) -> Any:
        """Release the optimizer's memory, with a backup on the host, if offloading is enabled.

        The first call moves the memory into a tag. During the move, a batch of tensors (at most 512
        MiB, or one larger tensor) exists twice. An optimizer step before `maybe_load_optimizer`
        raises an error.

        Raises:
            RankError: the call failed on a rank, and nothing is released on any rank.
            ConfigError, OutOfHostMemoryError, MemsaverError: the release failed, and this is the
                only rank.
        """
        if self._offloads():
            self._optimizers.pause(optimizer)
        return optimizer

    def maybe_load_optimizer(self, optimizer: Any, device: Any = None) -> Any:
        """Map the optimizer's memory again, at the same addresses and on the same device.

        Raises:
            RankError: the call failed on a rank; the memory remains released on all ranks, with its
                backup.
            OutOfDeviceMemoryError, MemsaverError: the call failed, and this is the only rank.
        """
        if self._offloads():
            self._optimizers.resume(optimizer)
        return optimizer

    def save_ckpt(self, *args: Any, **kwargs: Any) -> Any:
        """Call LightRFT's method with the memory of all optimizers mapped.

        Raises LightRFT's errors, and the errors of `maybe_load_optimizer`.
        """
        with self._optimizers.there():
            return self._originals["save_ckpt"](*args, **kwargs)

    def load_ckpt(self, *args: Any, **kwargs: Any) -> Any:
        """Call LightRFT's method with the memory of all optimizers mapped; see `save_ckpt`."""
        with self._optimizers.there():
            return self._originals["load_ckpt"](*args, **kwargs)

    def close(self) -> None:
        """Restore the strategy's original methods, and resume the optimizers. A collective.

        The engine's state does not change. Wake the engine first if LightRFT continues to use it.

        Raises:
            RankError, MemsaverError: an optimizer could not be resumed; nothing has changed.
        """
        self._optimizers.close()
        for name in _METHODS:
            if vars(self._strategy).get(name) == getattr(self, name):
                delattr(self._strategy, name)

    def _is_ours(self) -> bool:
        """Return whether the strategy has an SGLang engine."""
        strategy = self._strategy
        kind = getattr(strategy, "inference_engine_type", None)
        return strategy.inference_engine is not None and kind == "sglang"

    def _offloads(self) -> bool:
        if self._offload is not None:
            return self._offload
        return bool(getattr(self._strategy.args, "adam_offload", False))

    def _note(self, name: str) -> None:
        """Set the strategy's own status, a member of LightRFT's enumeration."""
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
    """Make memsaver manage the memory of a LightRFT strategy. Call this function on every rank.

    Call this function before the strategy creates its engine (`setup_inference_engine`) and before
    the first training step. LightRFT still manages engines other than SGLang's.

    Args:
        strategy: the result of LightRFT's `get_strategy`, whose methods are replaced.
        weights: the policy for the engine's weights during a sleep. "keep", which is LightRFT's own
            policy: the sleep releases only the KV cache and the graphs. "backup": the sleep
            releases the weights too, and the wake-up restores them from the host; the engine must
            have been started with `enable_weights_cpu_backup`. "resend": the sleep releases the
            weights without a backup, and LightRFT sends the weights from the actor when the engine
            wakes, unless the engine was just updated.
        offload_optimizer: whether `maybe_offload_optimizer` has an effect. None follows LightRFT's
            `--adam_offload`. With DeepSpeed, `--adam_offload` keeps the optimizer's states on the
            host permanently, so omit this flag and pass True.
        tag: the tag of the first optimizer; later optimizers use this tag with a number appended.
        timeout: the limit on an engine's sleep or wake-up, in seconds, including the wait for
            requests.

    Raises:
        ConfigError: `strategy` lacks LightRFT's interface or is already adapted, the policy for the
            weights is unknown, or the tag or the timeout is invalid.
    """
    missing = [name for name in (*_METHODS, *_USED) if not hasattr(strategy, name)]
    if missing:
        raise ConfigError(
            f"{type(strategy).__name__} is not a LightRFT strategy that memsaver supports: it "
            f"has no {', '.join(missing)}"
        )
    if "maybe_offload_optimizer" in vars(strategy):
        raise ConfigError("this strategy is already adapted: close the earlier result of adapt")
    if weights not in WEIGHTS_POLICIES:
        raise ConfigError(f"weights cannot be {weights!r}: it is one of {WEIGHTS_POLICIES}")
    check_tag(tag)
    check_timeout(timeout)
    engine = EngineMemory(strategy, weights, timeout)
    adapted = Adapted(strategy, engine, OptimizerMemory(tag), offload_optimizer)
    for name in _METHODS:
        setattr(strategy, name, getattr(adapted, name))
    return adapted
