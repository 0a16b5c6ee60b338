"""Whose turn a tag is: the callbacks and the native part of a transition are one step.

A call takes a turn on all of its tags at once, so that calls cannot wait for each other. The turn
lasts until the transition and its callbacks are over, on whichever thread that is.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator

from memsaver.errors import InvalidStateError

__all__ = ["Turn", "waiting_for"]


class Turn:
    """The right to change some tags, for one transition.

    `with Turn(names) as turn:` waits until nobody else has one of the tags, and gives them back at
    the end of the block, unless `hand_over` was called in it: then the thread that goes on calls
    `take_over`, and `release` at the end. The thread that runs a turn may take further ones, of the
    same tags too: a callback may pause and resume.

    Raises:
        InvalidStateError: on entering, where waiting would be for ever, because those who have the
            tags wait for this thread.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = list(dict.fromkeys(names))
        self._runner: int | None = None  # the thread; None: on its way to another, or over
        self.handed_over = False

    def __enter__(self) -> Turn:
        me = threading.get_ident()
        with _lock:
            if self._others(me):
                with _waiting(lambda: self._others(me), self.names):
                    _free.wait_for(lambda: not self._others(me))
            self._runner = me
            for name in self.names:
                _turns.setdefault(name, weakref.WeakSet()).add(self)
        return self

    def __exit__(self, *_: object) -> None:
        if not self.handed_over:
            self.release()

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
        with _lock:
            self._runner = None
            for name in self.names:
                if name in _turns:
                    _turns[name].discard(self)
            _free.notify_all()

    def __del__(self) -> None:
        try:
            with _lock:
                _free.notify_all()
        except TypeError:
            pass  # the interpreter is going, and the names above with it

    def _others(self, me: int) -> list[Turn]:
        """The turns that stand in the way of a thread; its own do not."""
        held = [turn for name in self.names for turn in _turns.get(name, ())]
        return [turn for turn in held if turn._runner != me]


@contextlib.contextmanager
def waiting_for(turn: Turn) -> Iterator[None]:
    """This thread waits inside until the turn is over, by means of its own.

    Raises:
        InvalidStateError: the turn's thread waits for this one, or is this one.
    """
    with _lock:
        waits = _waiting(lambda: [turn], turn.names)
        waits.__enter__()
    try:
        yield
    finally:
        with _lock:
            waits.__exit__(None, None, None)


# Under the lock, which is let go while a thread waits.
_lock = threading.RLock()  # entered directly: an interrupt cannot come between taking and holding
_free = threading.Condition(_lock)
# By tag: more than one where a callback took a further one. Weakly: a turn ends with whoever has
# it, also when an interrupt came before it could be released.
_turns: dict[str, weakref.WeakSet[Turn]] = {}
_waits: dict[int, list[Callable[[], list[Turn]]]] = {}  # by thread: which turns it waits for, now


@contextlib.contextmanager
def _waiting(wanted: Callable[[], list[Turn]], names: list[str]) -> Iterator[None]:
    """This thread waits inside. Who waits last sees the circle, if there is one, and does not."""
    me = threading.get_ident()
    if _leads_to(me, wanted()):
        raise InvalidStateError(
            f"the transition of {', '.join(map(repr, names))} that is under way waits for this "
            "thread, which is in the middle of a transition itself (a callback?) and cannot wait "
            "for it: do this after the callback"
        )
    _waits.setdefault(me, []).append(wanted)
    try:
        yield
    finally:
        _waits[me].remove(wanted)
        if not _waits[me]:
            del _waits[me]


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
