"""Perform a release or a wake-up of vLLM's worker on all ranks of an executor or on none.

vLLM's `Worker.sleep` and `Worker.wake_up` copy buffers before the allocator's transition, and
restore buffers and run checks after it. Every rank makes such a call inside a `Step`. The
transition and the end of the call are collective: if any part fails on a rank, all ranks undo the
transition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from memsaver.distributed.errors import GroupError, RankError

from ..engine.messages import RankReport, raisable
from ..engine.ranks import Group, first_failure

__all__ = ["Step", "move"]

Move = Callable[[Group], list[RankReport]]


class _MoveFailed(Exception):
    """An exception that ends the worker's call on every rank after a failure on any rank."""


class Step:
    """A call to vLLM's worker on every rank, with at most one transition of the allocator.

    Attributes:
        reports: the ranks' reports of the transition.
        failed: the ranks' reports with the first failure; empty if the call succeeded.
        undone: the ranks' reports of the rollback; empty if there was no rollback.
    """

    def __init__(self, group: Group, undo_nothing: Move) -> None:
        """Prepare a step.

        Args:
            group: the group of the executor's ranks.
            undo_nothing: the rollback on a rank that failed before the transition. This rollback
                only joins the collectives of the other ranks' rollback.
        """
        self.group = group
        self.reports: list[RankReport] = []
        self.failed: list[RankReport] = []
        self.undone: list[RankReport] = []
        self._moved = False
        self._undo = undo_nothing

    def run(self, call: Callable[[], None]) -> None:
        """Make the call. Failures on any rank are stored in `failed` and not raised.

        Raises:
            GroupError: a rank is unreachable.
        """
        error: Exception | None = None
        with _entered(self):
            try:
                call()
            except (GroupError, RankError):
                raise
            except _MoveFailed:
                pass  # on all ranks
            except Exception as raised:
                error = raised
        if not self.failed and (self._moved or error is not None):
            # If the error precedes the transition, other ranks are in the transition's exchange.
            ranks = self.group.attempt(lambda: _raise(error))
            self.failed = ranks if first_failure(ranks) else []
        if self.failed:
            self.undone = self._undo(self.group)

    def move(self, move: Move, undo: Move) -> None:
        """Run the call's transition. Collective."""
        self.reports = move(self.group)
        self._moved, self._undo = True, undo
        if first_failure(self.reports):
            self.failed = self.reports
            raise _MoveFailed


def move(move: Move, undo: Move) -> None:
    """Run the transition of the current step; outside a step, run the transition on this rank only.

    Raises:
        MemsaverError: the transition failed outside a step. The transition is undone.
    """
    step = _current.get()
    if step is not None:
        step.move(move, undo)
        return
    alone = Group(None)
    failed = first_failure(move(alone))
    if failed is not None and failed.failure is not None:
        undo(alone)
        raise raisable(failed.failure)


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


@contextmanager
def _entered(step: Step) -> Iterator[None]:
    token = _current.set(step)
    try:
        yield
    finally:
        _current.reset(token)


_current: ContextVar[Any] = ContextVar("memsaver_vllm_step", default=None)
