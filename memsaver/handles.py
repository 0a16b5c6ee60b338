"""One transition from its begin to its end, and the handle on one that goes on in the background.

Private but for `Transition`; the public functions are in `memsaver.transitions`.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from memsaver import costs, observers
from memsaver.background import Job
from memsaver.callers import caller
from memsaver.errors import ConfigError, InvalidStateError, MemsaverWarning
from memsaver.native import _C, STATES, State, check_tag
from memsaver.progress import Callback, callback_of
from memsaver.reports import Change, Report
from memsaver.torch_mode import torch_pools

__all__ = ["Call", "Progress", "Transition", "state"]

Progress: TypeAlias = bool | Callback | None

_TICK_SECONDS = 0.05  # between two calls of a progress callback


def state(tag: str) -> State:
    """The state of a tag.

    Raises:
        UnknownTagError: no region ever named it.
    """
    return STATES[_C.tag_state(check_tag(tag))]


@dataclass
class Call:
    """A pause of `out`, a resume of `into`, or both at once: begun on one thread, run on any.

    `finish` does all of it. Code that calls `begin` and `run` itself has a reservation of `names`,
    and calls `abandon` if one of them raises.

    Attributes:
        who: the place in the program that it is for, and the thread.
    """

    kind: str
    out: list[str]
    into: list[str]
    backup: int
    start: float = field(default_factory=time.perf_counter)
    who: str = field(default_factory=caller)
    native: _C.Transition | None = None
    _announced: list[str] = field(default_factory=list)
    _waiting: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"the {self.kind} of {', '.join(map(repr, [*self.out, *self.into])) or 'nothing'}"

    @property
    def names(self) -> list[str]:
        """The tags of both sides."""
        return [*self.out, *self.into]

    def finish(self) -> Report:
        """Reserve the tags, begin, run and release; tell callbacks of a rollback after a failure.

        Nothing of it must be cut by a signal's handler: see `_C.uninterrupted`.
        """
        with _C.Reservation(self.names):
            try:
                self.begin()
                return self.run()
            except BaseException as error:
                self.abandon(error)
                raise

    def begin(self) -> None:
        """Call the `on_pause` callbacks, and hold the tags. Copies nothing yet."""
        with observers.announcing(self.names):
            self._waiting = [name for name in self.into if state(name) is State.PAUSED]
            costs.before_resume(self._waiting)
            going = [name for name in self.out if state(name) is State.MAPPED]
            for name in going:
                self._announced.append(name)
                observers.announce_pause(name)
            changes = _C.changes()
            self.native = self._begin(self._dead_ranges(going), changes)
        if self.native is not None:
            self.native.set_caller(self.who.encode(errors="replace"))

    def run(self) -> Report:
        """Do it, and call the `on_resume` callbacks. Once."""
        rows: list[tuple[str, int, bool, int, int]] = []
        try:
            if self.native is not None:
                rows = self.native.run()
                costs.after_pause(self._announced, self.backup, rows)
        finally:
            _announce_all(self._waiting)
        return Report(time.perf_counter() - self.start, tuple(Change(*row) for row in rows))

    def abandon(self, error: BaseException) -> None:
        """It ended like this: give up what was not done, and tell whose tags stay mapped."""
        if self.native is not None:
            self.native.give_up()
        for name in self._announced:
            _announce_after(error, name)

    def _dead_ranges(self, going: list[str]) -> list[tuple[int, int]]:
        pools = torch_pools(required=False)
        saved = any(_C.tag_backup(name) if self.backup < 0 else self.backup for name in going)
        if pools is None or not saved:
            return []
        dead = pools.dead_ranges()
        costs.look_at_dead_blocks(going, dead)
        return dead

    def _begin(self, dead: list[tuple[int, int]], changes: int) -> _C.Transition | None:
        if self.out and self.into:
            return _C.swap_begin(self.out, self.into, self.backup, dead, changes)
        if self.out:
            return _C.pause_begin(self.out, self.backup, dead, changes)
        return _C.resume_begin(self.into) if self.into else None


class Transition(Job[Report]):
    """A pause, a resume or a swap under way, on a thread of its own. Any thread may use this.

    Its tags are taken from the call that made it until it is over: a call that wants one of them
    waits. The interpreter's exit waits for it. An error that nobody met in `wait` or `wait_stream`
    becomes a `MemsaverWarning` when this object is gone.
    """

    def __init__(self, call: Call, progress: Progress) -> None:
        """Reserve the tags and begin here, and do the rest on a thread.

        Nothing of it must be cut by a signal's handler: see `_C.uninterrupted`.
        """
        self._call = call
        self._progress = progress
        self._told_end = False
        self._reservation = reservation = _C.Reservation(call.names)
        reservation.take()
        try:
            call.begin()
        except BaseException as error:
            try:
                call.abandon(error)
            finally:
                reservation.release()
            raise

        def work() -> Report:
            try:
                return call.run()
            except BaseException as error:
                call.abandon(error)
                raise

        # Released when it is done: who gets a tag after it finds it done.
        super().__init__(
            call.kind, str(call), work, reservation.take_over, let_go=reservation.release
        )
        # Not before: a finalizer that wants the tags while the thread is started, in the middle of
        # `threading`, would wait for that thread, and it for this one.
        reservation.hand_over()

    def __repr__(self) -> str:
        return f"<memsaver.Transition: {self._call}, {'over' if self.done() else 'under way'}>"

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes copied so far and in all.

        The total is 0 while it is not known yet, and shrinks when unchanged contents are found.
        """
        native = self._call.native
        return native.progress() if native is not None else (0, 0)

    def wait(self, timeout: float | None = None) -> Report:
        """Wait until it is over, callbacks included; its report. May be called more than once.

        The progress callback of the call that made it is called here, on this thread. If it raises,
        the transition is over before the exception leaves. An interrupt leaves at once, and the
        transition goes on.

        Args:
            timeout: wait at most so many seconds.

        Raises:
            TimeoutError: time is up; the transition goes on.
            InvalidStateError: from one of its own callbacks, which it waits for.
            MemsaverError: what the pause, resume or swap met: see there. Nothing has changed then.
        """
        return super().wait(timeout)

    def wait_stream(self, stream: Any = None) -> None:
        """Let work that is submitted to a stream from now on run after the transition's copies.

        Returns when every copy of a resume is queued, which may be before it is done; of a pause or
        a swap when it is over.

        Args:
            stream: a `torch.cuda.Stream`, another object with a `cuda_stream`, or the address of a
                CUDA stream; None is torch's current stream.

        Raises:
            ConfigError: not a stream.
            MemsaverError: the transition failed: as from `wait`.
        """
        address = _address_of(stream)
        if self._call.native is None:
            return
        try:
            self._call.native.wait_stream(address)
        except InvalidStateError:
            self._await(None, None)
            self._collected()  # raises, if that is the reason
            raise

    def _wait(self, deadline: float | None, timeout: float | None) -> None:
        if self.done() and (self._told_end or not callable(self._progress)):
            return
        self._follow(deadline, timeout)

    def _await(self, deadline: float | None, timeout: float | None) -> None:
        """Wait until it is over, without calls of the progress callback."""
        if not self._over_within(None if deadline is None else deadline - time.monotonic()):
            raise self._too_late(timeout)

    def _over_within(self, seconds: float | None) -> bool:
        if self.done():
            return True
        self._check_process()
        # The core sees whether the transition's thread waits for this one.
        released = self._reservation.wait(-1.0 if seconds is None else max(seconds, 0.0))
        return released and super()._over_within(None)

    def _follow(self, deadline: float | None, timeout: float | None) -> None:
        with callback_of(self._progress, str(self._call)) as callback:
            if callback is None:
                self._await(deadline, timeout)
                return
            while True:
                left = _TICK_SECONDS if deadline is None else deadline - time.monotonic()
                if self._over_within(min(left, _TICK_SECONDS)):
                    break
                if left <= 0:
                    raise self._too_late(timeout)
                self._tell(callback, *self.progress)
            if self._outcome.failure is None:
                self._told_end = True
                total = self.progress[1]
                self._tell(callback, total, total)

    def _tell(self, callback: Callback, done: int, total: int) -> None:
        if total == 0:  # not known yet, or nothing to copy
            return
        try:
            callback(done, total)
        except Exception:
            self._await(None, None)
            if self._outcome.failure is not None:
                self._collected()  # raises what matters more
            raise


def _address_of(stream: Any) -> int:
    if stream is None:
        pools = torch_pools(required=False)
        return int(pools.torch.cuda.current_stream().cuda_stream) if pools is not None else 0
    address = getattr(stream, "cuda_stream", stream)
    if not isinstance(address, int) or isinstance(address, bool):
        raise ConfigError(
            f"wait_stream takes a torch.cuda.Stream or a stream's address, not "
            f"{type(stream).__name__}"
        )
    return address


def _announce_after(error: BaseException, tag: str) -> None:
    """Tell callbacks that a tag stays mapped; theirs are not the errors that count."""
    try:
        observers.announce_resume(tag)
    except Exception as second:
        warnings.warn(
            f"a callback for tag {tag!r} failed after the pause had failed ({error}): {second!r}",
            MemsaverWarning,
            stacklevel=5,
        )


def _announce_all(tags: list[str]) -> None:
    first: BaseException | None = None
    for tag in tags:
        try:
            observers.announce_resume(tag)
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first
