"""`UpdateSteps`: an update's collective calls, made by one engine's or by all engines' ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from ..together import Together

__all__ = ["UpdateSteps"]

if TYPE_CHECKING:
    from ..engine_set import EngineSet
    from ..rollout_engine import RolloutEngine

Result = TypeVar("Result")


class UpdateSteps:
    """The steps of an engine's updates.

    Each step is a collective call that fails on all ranks or on none.

    A trainer's shards are gathered from the ranks of several engines in one collective operation.
    Therefore, no engine's ranks may leave a step before those of the other engines.

    Args:
        engine: the engine whose connections the steps use.
    """

    def __init__(self, engine: RolloutEngine | EngineSet) -> None:
        self._own, self._fence = engine.together, engine._fence

    @contextlib.contextmanager
    def step(self, what: str, timeout: float) -> Iterator[Together]:
        """Run the block on this engine's ranks, then wait for the ranks of all engines.

        Args:
            what: a description of the step, the same on all ranks.
            timeout: the time limit for the step, in seconds.

        Raises:
            RankError, GroupError, MemsaverError: see `Together`; raised on all ranks.
        """
        failed: BaseException | None = None
        try:
            yield self._own
        except BaseException as error:
            failed = error
        self._fence.wait(what, failed, timeout)

    def gather(self, what: str, work: Callable[[], Result], timeout: float) -> list[Result]:
        """Run `Together.gather` on the engine's ranks as a step."""
        with self.step(what, timeout) as own:
            return own.gather(what, work, timeout)

    def on_leader(self, what: str, action: Callable[[], Any], timeout: float) -> None:
        """Run `Together.on_leader` as a step."""
        with self.step(what, timeout) as own:
            own.on_leader(what, action, timeout)

    def along(self, what: str, value: Result, timeout: float) -> list[Result]:
        """Return the values of the ranks that have this rank's position in each engine.

        See `Fence.gather`.
        """
        return self._fence.gather(what, value, timeout)
