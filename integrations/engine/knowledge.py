"""`Knowledge`: a controller's record of the state of an engine's memory."""

from __future__ import annotations

from collections.abc import Sequence

from memsaver._runtime.latches import Mutex

from .errors import EngineError
from .messages import Answer, SchedulerState

__all__ = ["Knowledge"]


class Knowledge:
    """The tags that are known to be released.

    Any thread may make calls; no call queries the engine.

    Some engines do not match replies to queries, but accept replies until they have one from each
    scheduler, so a late reply may belong to an earlier query. Therefore, `fits` and `are_new` check
    replies before `learn` records them.

    Attributes:
        anywhere: the tags that are released on at least one scheduler.
        everywhere: the tags that are released on all schedulers and have no memory on any rank.
            Data-parallel schedulers may differ after a failure.
        lost: the tags whose contents were lost when the last release or resume failed.
        is_known: whether `anywhere` is the current state.
        guarded: whether the engine has memsaver's plugin, which reports the engine's state and can
            refuse requests.
        admits: whether the engine accepts requests while it sleeps, and holds the requests or wakes
            up for them.

    Args:
        released: the tags that are released initially.
    """

    def __init__(self, released: frozenset[str]) -> None:
        self._lock = Mutex()
        self.anywhere = self.everywhere = released
        self.lost: frozenset[str] = frozenset()
        self.is_known = True
        self.guarded = self.admits = False
        self._numbers: dict[str, int] = {}  # of each scheduler's latest known answer

    def current(self) -> frozenset[str] | None:
        """Return `anywhere`, or None if it is not the current state."""
        with self._lock.locked():
            return self.anywhere if self.is_known else None

    def learn(self, states: Sequence[SchedulerState]) -> None:
        """Record the states that the schedulers report; change nothing if `states` is empty.

        Raises:
            EngineError: `states` is empty although earlier states were not, which means that an
                engine without memsaver's plugin has replaced the earlier engine. The state is
                unknown until an engine with the plugin reports its state.
        """
        if not states:
            if self.guarded:
                self.is_known = False
                raise EngineError(
                    "the engine had memsaver's plugin and no longer has it, so it was replaced, "
                    "and its released tags are unknown: create a new controller for it, or start "
                    "it with the plugin"
                )
            return
        sets = [frozenset(state.released) for state in states]
        with self._lock.locked():
            self.anywhere = frozenset().union(*sets)
            self.everywhere = sets[0].intersection(*sets).difference(*(s.held for s in states))
            self.lost = frozenset(tag for s in states if s.last for tag in s.last.lost)
            self.admits = all(s.when_asleep != "refuse" for s in states)
            self._numbers = {s.scheduler: s.last.number if s.last else 0 for s in states}
            self.guarded = self.is_known = True

    def check_done(self, operation: str, tags: Sequence[str]) -> None:
        """Raise `EngineError` if an accepted release or resume of `tags` had no effect."""
        with self._lock.locked():
            if operation == "release":
                undone = set(tags).difference(self.everywhere)
            else:
                undone = set(tags).intersection(self.anywhere)
        if undone:
            raise EngineError(
                f"the engine accepted the {operation} of {', '.join(sorted(undone))}, but reports "
                "that it had no effect: the engine may have been restarted, or another client has "
                "released or resumed tags"
            )

    def note(self, operation: str, tags: Sequence[str], answers: Sequence[Answer]) -> None:
        """Record a successful release or resume, using the answers if the engine reports states."""
        if answers and self.guarded:
            when = "wait" if self.admits else "refuse"
            self.learn([SchedulerState(a.scheduler, a.released, True, a, when) for a in answers])
            return
        changed = frozenset(tags)
        with self._lock.locked():
            before = self.anywhere
            self.anywhere = before | changed if operation == "release" else before - changed
            self.everywhere = self.anywhere
            self.is_known = True

    def doubt(self) -> None:
        """Mark the state as unknown until the schedulers' next report."""
        with self._lock.locked():
            self.is_known = False

    def trust(self) -> None:
        """Mark the state as known, because the engine did not receive the request."""
        with self._lock.locked():
            self.is_known = True

    def fits(self, states: Sequence[SchedulerState]) -> bool:
        """Return whether `states` contains one current state for each scheduler."""
        with self._lock.locked():
            return _is_one_of_each(states) and not any(
                (state.last.number if state.last else 0) < self._numbers.get(state.scheduler, 0)
                for state in states
            )

    def are_new(self, answers: Sequence[Answer]) -> bool:
        """Return whether `answers` contains every scheduler's answer to the latest request."""
        with self._lock.locked():
            return (
                _is_one_of_each(answers)
                and {answer.scheduler for answer in answers} >= set(self._numbers)
                and len(self.newer(answers)) == len(answers) > 0
            )

    def newer(self, answers: Sequence[Answer | None]) -> list[Answer]:
        """Return the answers that are later than the recorded answers."""
        with self._lock.locked():
            return [a for a in answers if a and a.number > self._numbers.get(a.scheduler, 0)]


def _is_one_of_each(replies: Sequence[SchedulerState | Answer]) -> bool:
    return len({reply.scheduler for reply in replies}) == len(replies)
