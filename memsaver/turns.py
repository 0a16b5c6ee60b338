"""Whose turn a tag is: the callbacks and the native part of a transition are one step.

A call takes a turn on all of its tags at once, so that calls cannot wait for each other. The turn
lasts until the transition and its callbacks are over, on whichever thread that is.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial

from memsaver.errors import InvalidStateError
from memsaver.interrupts import interrupts_deferred, once
from memsaver.latches import Latch

__all__ = ["Turn", "wait_for"]


class Turn:
    """The right to change some tags, for one transition.

    `with Turn(names) as turn:` waits until nobody else has one of the tags, and gives them back at
    the end of the block, unless `hand_over` was called in it: then the thread that goes on calls
    `take_over`, and `release` at the end. The thread that runs a turn may take further ones, of the
    same tags too: a callback may pause and resume.

    An interrupt ends the waiting. One that comes in the block is raised when the block is over.

    Raises:
        InvalidStateError: on entering, where waiting would be for ever, because those who have the
            tags wait for this thread.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = list(dict.fromkeys(names))
        self._runner: int | None = None  # the thread; None: on its way to another, or over
        self.handed_over = False
        self._uninterrupted = interrupts_deferred()

    def __enter__(self) -> Turn:
        me = threading.get_ident()
        if (freed := self._take(me)) is not None:
            _wait(lambda: self._others(me), self.names, partial(self._wait_and_take, me, freed))
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if not self.handed_over:
                self.release()
        finally:
            self._uninterrupted.__exit__()

    def hand_over(self) -> None:
        """Another thread goes on with it: this one waits for it like any other."""
        with _lock:
            self.handed_over = True
            self._runner = None

    def take_over(self) -> None:
        """This thread goes on with it."""
        with _lock:
            self._runner = threading.get_ident()

    def release(self) -> None:
        """It is over."""
        global _freed
        with _lock:
            for name in self.names:
                if name in _turns:
                    _turns[name].discard(self)
            self._runner = None
            freed, _freed = _freed, Latch()
        freed.open()

    def _take(self, me: int) -> Latch | None:
        """Take it where it is free, and no interrupt any more. Else what opens at a turn's end."""
        self._uninterrupted.__enter__()
        with _lock:
            freed = _freed if self._others(me) else None
            if freed is None:
                self._runner = me
                for name in self.names:
                    _turns.setdefault(name, weakref.WeakSet()).add(self)
        if freed is not None:
            self._uninterrupted.__exit__()
        return freed

    def _wait_and_take(self, me: int, freed: Latch | None) -> None:
        while freed is not None:
            freed.wait(_LOOK_SECONDS)
            freed = self._take(me)

    def _others(self, me: int) -> list[Turn]:
        """The turns that stand in the way of a thread; its own do not."""
        held = [turn for name in self.names for turn in _turns.get(name, ())]
        return [turn for turn in held if turn._runner != me]


def wait_for(turn: Turn, wait: Callable[[], None]) -> None:
    """Wait until the turn is over, by the given means.

    Raises:
        InvalidStateError: the turn's thread waits for this one, or is this one.
    """
    _wait(lambda: [turn], turn.names, wait)


# Between two looks whether a turn is gone that nobody released: an exception out of a signal's
# handler can come anywhere. (A finalizer that tells would run at the end of every turn, and swallow
# an interrupt that comes in it.)
_LOOK_SECONDS = 0.5

_lock = threading.RLock()  # entered directly: an interrupt cannot come between taking and holding
# What follows is read and changed under the lock.
_freed = Latch()  # opened and replaced when a turn is over
# By tag: more than one where a callback took a further one. Weakly: a turn ends with whoever has
# it, also when an exception out of a signal's handler came before it could be released.
_turns: dict[str, weakref.WeakSet[Turn]] = {}
_waits: dict[int, list[Callable[[], list[Turn]]]] = {}  # by thread: which turns it waits for, now


def _wait(wanted: Callable[[], list[Turn]], names: list[str], wait: Callable[[], None]) -> None:
    """Wait, for turns. Who waits last sees the circle, if there is one, and does not."""
    me = threading.get_ident()

    def forget() -> None:
        with _lock:
            if wanted in _waits.get(me, ()):
                _waits[me].remove(wanted)
                if not _waits[me]:
                    del _waits[me]

    forgotten: list[bool] = []
    try:
        with interrupts_deferred(), _lock:
            if _leads_to(me, wanted()):
                raise InvalidStateError(
                    f"the transition of {', '.join(map(repr, names))} that is under way waits for "
                    "this thread, which is in the middle of a transition itself (a callback?) and "
                    "cannot wait for it: do this after the callback"
                )
            _waits.setdefault(me, []).append(wanted)
        wait()
    finally:
        try:
            once(forgotten, forget)
        finally:
            once(forgotten, forget)


def _leads_to(me: int, turns: list[Turn]) -> bool:
    seen: set[Turn] = set()
    coming = list(turns)
    while coming:
        turn = coming.pop()
        if turn in seen:
            continue
        seen.add(turn)
        if turn._runner is None:
            continue
        if turn._runner == me:
            return True
        for wanted in _waits.get(turn._runner, ()):
            coming.extend(wanted())
    return False
