"""`Fence`: a barrier over the engines of a whole mesh, for calls that must complete on all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from .failures import SerializedError, error_of
from .ranks import Layout
from .together import GRACE_SECONDS, Connection, Together

__all__ = ["Fence"]

Value = TypeVar("Value")


class Fence:
    """A barrier between ranks of different engines, which also exchanges values and failures.

    The constructor is a collective call over the mesh. All ranks must make the calls of a fence in
    the same order; calls of different fences are independent of each other. Each `RolloutEngine`
    has its own fence, which its fenced sleeps and wake-ups and its weight updates use; an
    `EngineSet` uses the fence of its first engine.

    Args:
        layout: this rank's place in the mesh.
        timeout: seconds to wait for the other ranks.
        refused: an earlier failure of this rank, to be raised on all ranks; or None.
        lane: see `Together`.
        call: see `Together`.

    Raises:
        GroupError: not all ranks reached the barrier in time.
        MemsaverError: the error in `refused`. See `Together`.
    """

    LANE = "rollout/fence"

    def __init__(
        self,
        layout: Layout,
        timeout: float,
        refused: BaseException | None = None,
        *,
        lane: str = LANE,
        call: Sequence[Connection] = (),
    ) -> None:
        self._layout, self._timeout = layout, timeout
        self._along: list[Together] = []
        for group in layout.dp_groups:
            try:
                self._along.append(Together(group, timeout, lane, refused=refused, call=call))
            except BaseException as error:  # the ranks along the other dimensions still wait
                refused = error
        if refused is not None:
            self.close()
            raise refused

    def close(self) -> None:
        """Close the connections to other engines' ranks, without waiting for them. Idempotent."""
        for together in self._along:
            together.close()
        self._layout = self._layout.without_groups()

    def gather(self, what: str, value: Value, timeout: float) -> list[Value]:
        """Return the values of the ranks at this rank's position in all engines.

        A collective of all ranks of the mesh. The result is equal on the ranks at one position.

        Args:
            what: a description of the call, the same on all ranks.
            value: this rank's value.
            timeout: seconds to wait for the other ranks.
        """
        known = [value]
        for together in self._along:
            # An interrupt here would fail only the ranks at this position.
            rows = together.gather(what, known.copy, timeout, uninterrupted=True)
            known = [one for row in rows for one in row]
        return known

    def wait(self, what: str, error: BaseException | None, timeout: float | None = None) -> None:
        """Wait for all ranks of the mesh, and raise on all of them if an engine's ranks failed.

        Args:
            what: a description of the call, the same on all ranks.
            error: the failure of this rank's engine, the same on all its ranks; or None.
            timeout: seconds that the other engines may take, if longer than this fence's own
                timeout. A failure just before that timeout is still reported.

        Raises:
            error: `error` itself, if there is only one engine; an interrupt is raised only on its
                own rank.
            MemsaverError: the error of the engines' ranks; see `Together`. Its message also names
                the engines that failed.
            GroupError: not all ranks made the call.
        """
        if self._layout.dp_size == 1:
            if error is not None:
                raise error
            return
        limit = max(self._timeout, timeout or 0.0) + GRACE_SECONDS
        packed = [one.packed() for one in _failures(self._layout.leader, error)]
        rows = self.gather(what, (self._layout.dp_rank, packed), limit)
        parsed = (SerializedError.parse(one) for _, row in rows for one in row)
        each = {one.failure.rank: one for one in parsed}
        if error is not None and not isinstance(error, Exception):
            raise error
        if each:
            size = self._layout.tp_size * self._layout.dp_size
            engines = ", ".join(str(engine) for engine, row in sorted(rows) if row)
            what = f"{what} (engine {engines})"
            raise error_of(what, list(each.values()), size) from error


def _failures(leader: int, error: BaseException | None) -> list[SerializedError]:
    """Return an engine's error once for each rank that failed; [] if there is no error."""
    if error is None:
        return []
    one = SerializedError.of(leader, error)
    failures = getattr(error, "failures", None) or {leader: one.failure}
    return [SerializedError(failure, one.error) for failure in failures.values()]
