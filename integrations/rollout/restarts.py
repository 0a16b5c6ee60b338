"""Restarts of engines that died, with a limit on the number of restarts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from memsaver._runtime.timeouts import check_timeout
from memsaver.errors import ConfigError

from ..engine.errors import EngineDiedError, EngineError
from ..engine.fields import is_whole
from .errors import RestartLimitError
from .failures import clear_frames
from .fence import Fence

if TYPE_CHECKING:
    from .rollout_engine import RolloutEngine
    from .start import EngineStart

__all__ = ["Restarter", "Restarts"]

Result = TypeVar("Result")

_LANE = "rollout/restart"


@dataclass(frozen=True)
class Restarts:
    """Options for restarting an engine whose processes died; see `RolloutEngine.launch`.

    Attributes:
        most: the maximum number of restarts within `seconds`. Failed restarts count toward this
            limit.
        seconds: the period to which the limit `most` applies. Each restart itself takes at most the
            engine's `timeout`.
        send: a function that sends the weights. This function is called with the engine on all
            ranks of the mesh after a restart, because a new engine has the weights of its
            `model_path`. If None (the default), nothing is sent, and the repeated batch uses the
            weights of `model_path`.
    """

    most: int = 2
    seconds: float = 3600.0
    send: Callable[[RolloutEngine], object] | None = None

    @property
    def limits(self) -> str:
        """The values that must be the same on all ranks, formatted for an error message."""
        return f"most={self.most}, seconds={self.seconds:g}, send={self.send is not None}"

    def check(self) -> None:
        """Raise `ConfigError` if a value is invalid."""
        if not is_whole(self.most) or self.most < 0:
            raise ConfigError(f"restarts: most must be 0 or a larger integer, not {self.most!r}")
        check_timeout(self.seconds, "restarts: seconds")
        if self.send is not None and not callable(self.send):
            raise ConfigError(f"restarts: send must be a function of the engine, not {self.send!r}")


class Restarter:
    """Restarts a mesh's engines. Every call is a collective call of all ranks of the mesh.

    Args:
        engine: the engine of this rank's group.
        restarts: the limits, which must be the same on all ranks.
    """

    def __init__(self, engine: EngineStart, restarts: Restarts) -> None:
        self._engine, self._restarts = engine, restarts
        self._times: list[float] = []
        self._lacks_weights = False  # set after a restart if sending the weights failed
        self._fence = Fence(engine.layout, engine.timeout, lane=_LANE)

    def close(self) -> None:
        """Close the connections to the ranks of other engines, without waiting. Idempotent."""
        self._fence.close()

    def answered(self, what: str, attempt: Callable[[], Result], limit: float) -> Result:
        """Call `attempt` and return its result; if the engine died, restart it and try again.

        Args:
            what: a description of the call, the same on all ranks.
            attempt: a collective call of the engine's ranks.
            limit: the time limit for one attempt, in seconds.

        Raises:
            RestartLimitError: the engine died, and the limit on restarts is reached.
            MemsaverError: the errors of `attempt` and `restart`.
        """
        why = ""
        try:
            if self._lacks_weights:
                self._send()
        except EngineDiedError as died:
            why = str(died)
            clear_frames(died)
        if why:
            self.restart(why)
        results: list[Result] = []
        while True:
            failure: BaseException | None = None
            if not results:  # otherwise only other engines died
                try:
                    results.append(attempt())
                except BaseException as error:
                    failure = error
            try:
                self._fence.wait(what, failure, limit)
            except EngineDiedError as died:
                why = str(died)
                clear_frames(died)
            else:
                return results[0]
            failure = None
            self.restart(why)

    def restart(self, why: str = "") -> None:
        """Restart the engines of the mesh that died, and send the weights to all engines.

        If a restart fails or an engine dies again, the restart is repeated, up to the limit.

        Args:
            why: the reason for the restart, for error messages.

        Raises:
            RestartLimitError: the limit on restarts is reached.
            MemsaverError: the weights could not be sent to engines that are alive. The next
                generation or restart sends the weights again.
        """
        while True:
            self._count(why)
            try:
                self._start()
            except EngineError as error:
                why = str(error)
                continue
            try:
                self._send()
            except EngineDiedError as error:
                why = str(error)
                clear_frames(error)
                continue
            return

    def _count(self, why: str) -> None:
        """Count a restart, or raise `RestartLimitError` on all ranks."""
        restarts, now = self._restarts, time.monotonic()
        recent = [at for at in self._times if at > now - restarts.seconds]

        def check() -> None:
            if len(recent) >= restarts.most:
                self._engine._end_dead()
                raise RestartLimitError(
                    f"an engine is dead and will not be restarted: {len(recent)} restarts in the "
                    f"last {restarts.seconds:g} s (limit: {restarts.most}){why and f': {why}'}"
                )

        what = "the number of restarts"
        self._all(what, lambda: self._engine._generating.on_leader(what, check))
        self._times = [*recent, now]

    def _start(self) -> None:
        """Restart this rank's engine if it died."""
        self._lacks_weights = True
        self._all("the restart of an engine", self._engine._start_again)

    def _send(self) -> None:
        """Send the weights; raise a failure of any rank on all ranks of the mesh."""
        if self._restarts.send is not None:
            failure: BaseException | None = None
            try:
                self._restarts.send(cast("RolloutEngine", self._engine))
            except BaseException as error:
                failure = error
            what = "sending the weights after a restart"
            try:
                self._all(what, lambda: self._engine._generating.wait(what, failure))
            finally:
                failure = None  # its frames may keep a bucket of weights alive
        self._lacks_weights = False

    def _all(self, what: str, action: Callable[[], Any]) -> None:
        """Run a collective call of the engine's ranks.

        If the call fails on any rank, raise an error on all ranks of the mesh.
        """
        failure: BaseException | None = None
        try:
            action()
        except BaseException as error:
            failure = error
        self._fence.wait(what, failure, self._engine.timeout)
