"""Where an update's ranks meet: those of one engine, and those of all engines beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from memsaver.integrations.rollout.fence import Fence
from memsaver.integrations.rollout.ranks import Layout
from memsaver.integrations.rollout.together import Together

__all__ = ["Meetings"]

Result = TypeVar("Result")


class Meetings:
    """The ranks of an engine's updates. Each step is a collective, and fails on all or on none.

    A trainer's shards are gathered over the ranks of several engines at once, so that an engine's
    ranks that left alone would keep the others waiting.

    Attributes:
        number: counts the updates that began; the same on all ranks.

    Args:
        own: the ranks of the engine.
        layout: where this rank stands.
        timeout: seconds to wait for the ranks of other engines.
    """

    def __init__(self, own: Together, layout: Layout, timeout: float) -> None:
        self.number = 0
        self._own = own
        self._fence = Fence(layout, timeout) if layout.dp_size > 1 else None
        groups = layout.dp_groups if layout.dp_size > 1 else ()
        self._along = [Together(group, timeout, "rollout/weights") for group in groups]

    def close(self) -> None:
        """Close the connections with the ranks of other engines. Idempotent; waits for no rank."""
        if self._fence is not None:
            self._fence.close()
        for together in self._along:
            together.close()

    @contextlib.contextmanager
    def step(self, what: str, timeout: float) -> Iterator[Together]:
        """For the block, this engine's ranks do something; then those of all engines meet.

        Args:
            what: the step in words, the same on all ranks.
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
            self._fence.meet(what, failed, timeout)
        if failed is not None:
            raise failed

    def gather(self, what: str, work: Callable[[], Result], timeout: float) -> list[Result]:
        """`Together.gather` of the engine's ranks, as a step."""
        with self.step(what, timeout) as own:
            found: list[Result] = own.gather(what, work, timeout)
        return found

    def on_leader(self, what: str, action: Callable[[], Any], timeout: float) -> None:
        """`Together.on_leader`, as a step."""
        with self.step(what, timeout) as own:
            own.on_leader(what, action, timeout)

    def along(self, what: str, value: Result, timeout: float) -> list[Result]:
        """The values of all engines' ranks of this rank's place, as seen by all of them alike.

        A collective of all ranks; [] of a single engine.
        """
        known = [value]
        for together in self._along:
            rows = together.gather(what, known.copy, timeout)
            known = [one for row in rows for one in row]
        return known if self._along else []
