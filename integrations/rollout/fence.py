"""`Fence`: the engines of a whole mesh, where a call is to be done on all of them."""

from __future__ import annotations

from memsaver.integrations.rollout.failures import Told, error_of
from memsaver.integrations.rollout.ranks import Layout
from memsaver.integrations.rollout.together import Together

__all__ = ["Fence"]


class Fence:
    """Lets ranks of different engines wait for each other, and hear of each other's failures.

    Args:
        layout: where this rank stands.
        timeout: seconds to wait for the others.
    """

    def __init__(self, layout: Layout, timeout: float) -> None:
        self._layout, self._timeout = layout, timeout
        self._along = [Together(group, timeout, "rollout/fence") for group in layout.dp_groups]

    def meet(self, what: str, error: BaseException | None, timeout: float | None = None) -> None:
        """Wait for all ranks of the mesh; an error that an engine's ranks bring is raised on all.

        Args:
            what: the call in words, the same on all ranks.
            error: what failed with this rank's engine, the same on all ranks of it, or None.
            timeout: seconds that the others' engines may take, where that is longer than this
                fence's own.
        """
        limit = max(self._timeout, timeout or 0.0)
        told = _told(self._layout.leader, error)
        for together in self._along:
            mine = list(told)
            rows = together.gather(what, mine.copy, limit)
            told = [one for row in rows for one in row]
        each = {one.failure.rank: one for one in told}
        if each:
            size = self._layout.tp_size * self._layout.dp_size
            raise error_of(what, list(each.values()), size) from error


def _told(leader: int, error: BaseException | None) -> list[Told]:
    """What failed, by the ranks that it failed on."""
    if error is None:
        return []
    one = Told.of(leader, error)
    failures = getattr(error, "failures", None) or {leader: one.failure}
    return [Told(failure, one.error) for failure in failures.values()]
