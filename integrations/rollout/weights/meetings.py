"""`Meetings`: the collectives of an update, among an engine's ranks and among all engines."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from ..fence import Fence
from ..ranks import Layout
from ..together import Together

__all__ = ["Meetings", "meetings_of"]

if TYPE_CHECKING:
    from ..engine_set import EngineSet
    from ..rollout_engine import RolloutEngine

Result = TypeVar("Result")


class Meetings:
    """The steps of an engine's updates. Each is a collective that fails on all ranks or on none.

    A trainer's shards are gathered from the ranks of several engines in one collective, so the
    ranks of one engine must not leave a step before the others.

    Attributes:
        number: the number of updates that have begun; equal on all ranks.

    Args:
        own: the connection of the engine's ranks.
        layout: this rank's place in the mesh.
        timeout: seconds to wait for the ranks of other engines.
    """

    def __init__(self, own: Together, layout: Layout, timeout: float) -> None:
        self.number = 0
        self._own = own
        self._fence = Fence(layout, timeout) if layout.dp_size > 1 else None
        groups = layout.dp_groups if layout.dp_size > 1 else ()
        self._along = [Together(group, timeout, "rollout/weights") for group in groups]

    def close(self) -> None:
        """Close the connections to the ranks of other engines. Idempotent; waits for no rank."""
        if self._fence is not None:
            self._fence.close()
        for together in self._along:
            together.close()

    @contextlib.contextmanager
    def step(self, what: str, timeout: float) -> Iterator[Together]:
        """Run the block on this engine's ranks, then wait for the ranks of all engines.

        Args:
            what: a description of the step, the same on all ranks.
            timeout: seconds that the step may take.

        Raises:
            RankError, GroupError, MemsaverError: see `Together`; raised on all ranks.
        """
        failed: BaseException | None = None
        try:
            yield self._own
        except BaseException as error:
            failed = error
        if self._fence is not None:
            self._fence.wait(what, failed, timeout)
        if failed is not None:
            raise failed

    def gather(self, what: str, work: Callable[[], Result], timeout: float) -> list[Result]:
        """Run `Together.gather` on the engine's ranks, as a step."""
        with self.step(what, timeout) as own:
            return own.gather(what, work, timeout)

    def on_leader(self, what: str, action: Callable[[], Any], timeout: float) -> None:
        """Run `Together.on_leader`, as a step."""
        with self.step(what, timeout) as own:
            own.on_leader(what, action, timeout)

    def along(self, what: str, value: Result, timeout: float) -> list[Result]:
        """Return the values of the ranks at this rank's position in all engines.

        A collective of all ranks. The result is equal on these ranks; [] for a single engine.
        """
        known = [value]
        for together in self._along:
            rows = together.gather(what, known.copy, timeout)
            known = [one for row in rows for one in row]
        return known if self._along else []


def meetings_of(engine: RolloutEngine | EngineSet) -> Meetings:
    """Return the engine's `Meetings`, which all of its updates use and its `close` closes."""
    if engine not in _meetings:
        made = Meetings(engine.together, engine.layout, engine.timeout)
        engine._connections.callback(made.close)
        _meetings[engine] = made
    return _meetings[engine]


_meetings: weakref.WeakKeyDictionary[Any, Meetings] = weakref.WeakKeyDictionary()
