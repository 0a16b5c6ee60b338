"""`Fence`: the engines of a whole mesh, where a call is to be done on all of them."""

from __future__ import annotations

from memsaver.integrations.rollout.failures import Told, error_of
from memsaver.integrations.rollout.ranks import Layout
from memsaver.integrations.rollout.together import GRACE_SECONDS, Together

__all__ = ["Fence", "connections_of"]


class Fence:
    """Lets ranks of different engines wait for each other, and hear of each other's failures.

    Making one is a collective of the mesh.

    Args:
        layout: where this rank stands.
        timeout: seconds to wait for the others.
        refused: what has failed on this rank already, to be raised on all ranks; or None.

    Raises:
        GroupError: not all ranks came in time.
        MemsaverError: the error in `refused`. See `Together`.
    """

    LANE = "rollout/fence"

    def __init__(
        self, layout: Layout, timeout: float, refused: BaseException | None = None
    ) -> None:
        self._layout, self._timeout = layout, timeout
        self._along: list[Together] = []
        left = connections_of(layout)
        for group in layout.dp_groups:
            left -= group.size() > 1
            try:
                together = Together(group, timeout, self.LANE, refused=refused, following=left)
                self._along.append(together)
            except BaseException as error:  # the ranks along the other dimensions wait
                refused = error
        if refused is not None:
            self.close()
            raise refused

    def close(self) -> None:
        """Close the connections with the ranks of other engines. Idempotent; waits for no rank."""
        for together in self._along:
            together.close()
        self._layout = self._layout.without_groups()

    def meet(self, what: str, error: BaseException | None, timeout: float | None = None) -> None:
        """Wait for all ranks of the mesh; an error that an engine's ranks bring is raised on all.

        Args:
            what: the call in words, the same on all ranks.
            error: what failed with this rank's engine, the same on all ranks of it, or None.
            timeout: seconds that the others' engines may take, where that is longer than this
                fence's own. An engine that fails at the end of them is waited for still.

        Raises:
            error: where there is one engine alone; or it is an interrupt, for this rank alone.
            MemsaverError: the error of the engines' ranks, see `Together`.
            GroupError: not all ranks made the call.
        """
        if self._layout.dp_size == 1:
            if error is not None:
                raise error
            return
        limit = max(self._timeout, timeout or 0.0) + GRACE_SECONDS
        packed = [one.packed() for one in _told(self._layout.leader, error)]
        for together in self._along:
            rows = together.gather(what, packed.copy, limit)
            packed = [one for row in rows for one in row]
        each = {one.failure.rank: one for one in map(Told.parse, packed)}
        if error is not None and not isinstance(error, Exception):
            raise error
        if each:
            size = self._layout.tp_size * self._layout.dp_size
            raise error_of(what, list(each.values()), size) from error


def connections_of(layout: Layout) -> int:
    """Return the number of collectives that making a fence is."""
    return sum(group.size() > 1 for group in layout.dp_groups)


def _told(leader: int, error: BaseException | None) -> list[Told]:
    """What failed, by the ranks that it failed on."""
    if error is None:
        return []
    one = Told.of(leader, error)
    failures = getattr(error, "failures", None) or {leader: one.failure}
    return [Told(failure, one.error) for failure in failures.values()]
