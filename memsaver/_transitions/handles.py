"""The steps of one transition, and the handle of a transition in the background.

Only `Transition` is public. The module `transitions` contains the public functions.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from memsaver._memory import choices, costs
from memsaver._memory.memory_ranges import ranges_of
from memsaver._memory.torch_mode import torch_pools
from memsaver._runtime.background import Job
from memsaver._runtime.callers import caller
from memsaver._runtime.native import _C, STATES, State, check_tag, note
from memsaver._transitions import observers
from memsaver._transitions.progress import Callback, callback_of
from memsaver._transitions.reports import Change, Report
from memsaver.errors import ConfigError, InvalidStateError, MemsaverWarning

__all__ = ["Call", "Progress", "Transition", "state"]

Progress: TypeAlias = bool | Callback | None

_TICK_SECONDS = 0.05  # the interval between two calls of a progress callback


def state(tag: str) -> State:
    """Return the state of a tag.

    Raises:
        UnknownTagError: no region has ever named the tag.
    """
    return STATES[_C.tag_state(check_tag(tag))]


@dataclass
class Call:
    """A pause of `out`, a resume of `into`, or a swap of both.

    `finish` runs all steps. Code that calls `begin` and `run` separately must own a reservation of
    `names`, and must call `abandon` if `begin` or `run` raises. A call can run on a different
    thread from the one that began it.

    Attributes:
        who: where in the program the call was made, and the name of the calling thread.
    """

    kind: str
    out: list[str]
    into: list[str]
    backup: int
    start: float = field(default_factory=time.perf_counter)
    who: str = field(default_factory=caller)
    native: _C.Transition | None = None
    _notified: list[str] = field(default_factory=list)
    _waiting: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"the {self.kind} of {', '.join(map(repr, [*self.out, *self.into])) or 'nothing'}"

    @property
    def names(self) -> list[str]:
        """Return the tags of both sides."""
        return [*self.out, *self.into]

    def finish(self) -> Report:
        """Reserve the tags, run all steps, and release the tags. Notify callbacks of a failure.

        No signal handler may run between these steps: see `_C.uninterrupted`.
        """
        with _C.Reservation(self.names):
            try:
                self.begin()
                return self.run()
            except BaseException as error:
                self.abandon(error)
                raise

    def begin(self) -> None:
        """Call the `on_pause` callbacks, and begin the native transition. Copies nothing."""
        with observers.notifying(self.names):
            self._waiting = [name for name in self.into if state(name) == "paused"]
            costs.before_resume(self._waiting)
            going = [name for name in self.out if state(name) == "mapped"]
            for name in going:
                self._notified.append(name)
                observers.notify_pause(name)
            changes = _C.changes()
            if self.names:
                unowned = self._unowned_ranges(going)
                self.native = _C.begin(self.out, self.into, self.backup, unowned, changes)
        if self.native is not None:
            self.native.set_caller(self.who.encode(errors="replace"))

    def run(self) -> Report:
        """Run the transition, and call the `on_resume` callbacks. Must be called only once."""
        rows: list[tuple[str, int, bool, int, int]] = []
        try:
            if self.native is not None:
                rows = self.native.run()
                costs.after_pause(self._notified, self.backup, rows)
                choices.warn_of_empty(row for row in rows if row[0] in self._notified)
        finally:
            _notify_all(self._waiting)
        return Report(time.perf_counter() - self.start, tuple(Change(*row) for row in rows))

    def abandon(self, error: BaseException) -> None:
        """Cancel a transition that has not run, and notify callbacks of tags that stay mapped."""
        if self.native is not None:
            self.native.give_up()
        leaving: BaseException | None = None
        for name in self._notified:
            try:
                observers.notify_resume(name)
            except Exception as second:
                note(
                    f"a callback for tag {name!r} failed after the pause had failed ({error}): "
                    f"{second!r}",
                    MemsaverWarning,
                )
            except BaseException as second:  # an exit or an interrupt
                leaving = leaving or second
        if leaving is not None:
            raise leaving from error

    def _unowned_ranges(self, going: list[str]) -> list[tuple[int, int]]:
        pools = torch_pools(required=False)
        saved = any(_C.tag_backup(name) if self.backup < 0 else self.backup for name in going)
        if pools is None or not saved:
            return []
        unowned = pools.unowned_ranges()
        costs.check_unowned_blocks(going, unowned)
        return unowned


class Transition(Job[Report]):
    """A pause, a resume or a swap in progress on a separate thread. Thread-safe.

    Other calls that need one of the transition's tags wait for the transition to end, as does
    interpreter exit. If the transition fails and no `wait` call raises its error, a
    `MemsaverWarning` reports the error when this object is deleted.
    """

    def __init__(self, call: Call, progress: Progress) -> None:
        """Reserve the tags and begin the call on this thread, and run the call on a new thread.

        No signal handler may run between these steps: see `_C.uninterrupted`.
        """
        self._call = call
        self._progress = progress
        self._reported_end = False
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

        # Released only once `done` is true, so that a thread that waited for a tag sees `done` as
        # true.
        super().__init__(
            call.kind, str(call), work, reservation.take_over, release=reservation.release
        )
        # Called only after the thread has started. Otherwise, a finalizer on this thread that needs
        # the tags would wait for the new thread, while this thread waits for that thread to start.
        reservation.hand_over()

    def __repr__(self) -> str:
        return f"<memsaver.Transition: {self._call}, {'done' if self.done() else 'in progress'}>"

    @property
    def progress(self) -> tuple[int, int]:
        """The number of bytes copied so far, and the total number of bytes to copy.

        The total is 0 until it is known, and decreases when the transition finds unchanged
        contents.
        """
        native = self._call.native
        return native.progress() if native is not None else (0, 0)

    def wait(self, timeout: float | None = None) -> Report:
        """Wait for the transition and its callbacks to end, and return the report. Can be repeated.

        While `wait` waits, it calls the transition's progress callback on the calling thread. If
        the callback raises, `wait` raises the exception after the transition has ended. An
        interrupt is raised at once, while the transition continues.

        Args:
            timeout: the maximum time to wait, in seconds; None means no limit.

        Raises:
            TimeoutError: the transition did not end within the timeout, and continues.
            InvalidStateError: one of the transition's own callbacks made this call.
            MemsaverError: the pause, resume or swap failed. The tags are unchanged.
        """
        return self._waited(timeout)

    def wait_stream(self, stream: Any = None, *, memory: Any = None) -> None:
        """Make all future work on a stream wait for the transition's copies.

        For a resume, the call returns when all copies are queued, possibly before they are
        complete. For a pause or a swap, the call returns when the transition has ended.

        Args:
            stream: a `torch.cuda.Stream`, another object with a `cuda_stream`, or the address of a
                CUDA stream; None means torch's current stream.
            memory: see `wait_memory`. During a resume, the work waits only until the contents of
                this memory are restored. Copies run in address order. If this transition does not
                resume all of the memory, the work waits for all copies. The default is all memory.

        Raises:
            ConfigError: `stream` is not a stream, or `memory` has no addresses.
            MemsaverError: the transition failed (see `wait`).
        """
        address = _address_of(stream)
        self._order(None if memory is None else ranges_of(memory), address)

    def wait_memory(self, memory: Any) -> None:
        """Wait on the host until a resume has restored the contents of `memory`.

        Even if the contents are ready earlier, a call for a resume returns only after all copies
        are queued. A call for a pause or a swap returns only after the transition has ended.

        Args:
            memory: a dense tensor, an object with an `address` and `nbytes`, a pair (address,
                bytes), or a list of these. If the list is empty, the call does not wait for copies.
                If this transition does not resume all of the memory, the call waits for all copies.

        Raises:
            ConfigError: `memory` has no addresses.
            MemsaverError: the transition failed (see `wait`).
        """
        self._order(ranges_of(memory), None)

    def _order(self, ranges: list[tuple[int, int]] | None, stream: int | None) -> None:
        native = self._call.native
        if native is None:
            return
        try:
            if ranges is not None:
                native.wait_ranges(ranges, stream)
            elif stream is not None:
                native.wait_stream(stream)
        except InvalidStateError:
            self._await(None, None)
            self._collected()  # raises if the transition failed
            raise

    def _wait(self, deadline: float | None, timeout: float | None) -> None:
        if self.done() and (self._reported_end or not callable(self._progress)):
            return
        self._follow(deadline, timeout)

    def _await(self, deadline: float | None, timeout: float | None) -> None:
        """Wait for the transition to end, without calling the progress callback."""
        if not self._over_within(None if deadline is None else deadline - time.monotonic()):
            raise self._too_late(timeout)

    def _over_within(self, seconds: float | None) -> bool:
        if self.done():
            return True
        self._check_process()
        # The core detects whether the transition's thread waits for this thread.
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
                self._report(callback, *self.progress)
            if self._outcome.failure is None:
                self._reported_end = True
                total = self.progress[1]
                self._report(callback, total, total)

    def _report(self, callback: Callback, done: int, total: int) -> None:
        if total == 0:  # the total is unknown, or there is nothing to copy
            return
        try:
            callback(done, total)
        except Exception:
            self._await(None, None)
            if self._outcome.failure is not None:
                self._collected()  # the transition's error takes precedence
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
    if not 0 <= address < 1 << 64:
        raise ConfigError(f"a stream's address must be from 0 to 2^64 - 1, not {address}")
    return address


def _notify_all(tags: list[str]) -> None:
    first: BaseException | None = None
    for tag in tags:
        try:
            observers.notify_resume(tag)
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first
