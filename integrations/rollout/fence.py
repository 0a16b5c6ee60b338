"""`Fence`: a barrier across all engines of a mesh, for calls that must complete on every engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from .failures import SerializedError, error_of
from .ranks import Layout
from .together import GRACE_SECONDS, Connection, Together

__all__ = ["Fence"]

Value = TypeVar("Value")


class Fence:
    """A barrier between the ranks of different engines that also exchanges values and failures.

    The constructor is a collective call over the mesh. All ranks must make a fence's calls in the
    same order; the calls of different fences are independent. Each `RolloutEngine` has its own
    fence for weight updates, and for sleeps and wake-ups with `fence=True`. An `EngineSet` uses the
    fence of its first engine.

    Args:
        layout: this rank's place in the mesh.
        timeout: seconds to wait for the other ranks.
        refused: an earlier failure of this rank that all ranks must raise, or None.
        lane: see `Together`.
        call: see `Together`.
        names_engines: whether errors name the engines that failed. Pass False if every rank of the
            layout counts as an engine, because errors name the ranks in any case.

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
        names_engines: bool = True,
    ) -> None:
        self._layout, self._timeout, self._names_engines = layout, timeout, names_engines
        self._along: list[Together] = []
        for group in layout.dp_groups:
            try:
                self._along.append(Together(group, timeout, lane, refused=refused, call=call))
            except BaseException as error:  # the ranks along the other dimensions are still waiting
                refused = error
        if refused is not None:
            self.close()
            raise refused

    def close(self) -> None:
        """Close the connections to the ranks of other engines, without waiting. Idempotent."""
        for together in self._along:
            together.close()
        self._layout = self._layout.without_groups()

    def gather(self, what: str, value: Value, timeout: float) -> list[Value]:
        """Return the values of the ranks that have this rank's position in each engine.

        This is a collective call of all ranks of the mesh. All ranks with the same position receive
        the same result.

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
        """Wait for all ranks of the mesh; if an engine's ranks failed, raise an error on all ranks.

        Args:
            what: a description of the call, the same on all ranks.
            error: the failure of this rank's engine, or None. The value must be the same on all
                ranks of the engine.
            timeout: the time limit for the other engines in seconds, if it is longer than this
                fence's own timeout. A failure just before the time limit is still reported.

        Raises:
            error: `error` itself, if there is only one engine; an interrupt is raised only on the
                interrupted rank.
            MemsaverError: the error of the engines' ranks; see `Together`. The message also names
                the engines that failed, if `names_engines` is True.
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
            if self._names_engines:
                engines = ", ".join(str(engine) for engine, row in sorted(rows) if row)
                what = f"{what} (engine {engines})"
            raise error_of(what, list(each.values()), size) from error


def _failures(leader: int, error: BaseException | None) -> list[SerializedError]:
    """Return a list with an engine's error for each rank that failed; [] if there is no error."""
    if error is None:
        return []
    one = SerializedError.of(leader, error)
    failures = getattr(error, "failures", None) or {leader: one.failure}
    return [SerializedError(failure, one.error) for failure in failures.values()]
