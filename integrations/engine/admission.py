"""`Admission`: the policy for requests that reach an engine whose memory is released.

An engine's integration calls `admit` before it sends a request to the processes that own the
memory. Depending on the policy, the call raises an error, waits until the memory is mapped, or maps
the memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from memsaver.errors import MemsaverError, OutOfDeviceMemoryError

from .errors import EngineAsleepError, EngineTimeoutError
from .policies import Policy
from .refusal_log import RefusalLog
from .refusals import asleep_error, asleep_text
from .shared_query import retrieve
from .tags import RELEASE_ORDER, RESUME_ORDER

__all__ = ["EVERYTHING", "Admission", "ClientGoneError", "RequestAbortedError", "Sleeper"]

EVERYTHING = frozenset(RELEASE_ORDER)

_POLL_SECONDS = 1.0
_WAKE_SECONDS = 60.0  # the minimum time that a request waits for a wake-up
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 1.0


class Sleeper(Protocol):
    """The calls that `Admission` makes to an engine."""

    async def released(self) -> frozenset[str] | None:
        """Query the released tags; return None if the engine does not report them."""

    async def resume(self, tags: Collection[str]) -> frozenset[str]:
        """Resume tags, and return the tags that are still released. Raises if the resume fails."""


class ClientGoneError(MemsaverError, ValueError):
    """The client disconnected while its request was waiting."""

    _status = "CLIENT_GONE"


class RequestAbortedError(MemsaverError, ValueError):
    """A caller aborted the request while it was waiting."""

    _status = "REQUEST_ABORTED"


@dataclass(eq=False)
class _Waiter:
    """A held request.

    Attributes:
        admitted: a future that is done once the tags in `needs` are mapped.
        left: a future that is done once the request is no longer held.
        before: an earlier request that may still be held, or None.
    """

    needs: frozenset[str]
    admitted: asyncio.Future[None] = field(default_factory=asyncio.Future)
    left: asyncio.Future[None] = field(default_factory=asyncio.Future)
    before: _Waiter | None = None


class Admission:
    """Admits requests to an engine. All calls must be made on one event loop.

    The recorded set of released tags may be out of date, because other processes may also release
    and resume memory. Therefore, the engine is queried again before a request is refused, and
    repeatedly while requests wait. Failed requests are logged; see `RefusalLog`.

    Args:
        policy: the policy for requests that need released memory.
        sleeper: the object that makes the calls to the engine.
        without_backup: tags whose contents a release discards. A request that reads such a tag is
            refused while the tag is released, because its results would be wrong after a wake-up.

    Attributes:
        lost: tags that the engine reported as having no contents, or only part of their new
            contents, even if the tags are mapped. A request that reads such a tag does not wake the
            engine.
        changing: a lock that prevents wake-ups while its owner releases or resumes tags.
    """

    def __init__(
        self, policy: Policy, sleeper: Sleeper, without_backup: Collection[str] = ()
    ) -> None:
        self.policy = policy
        self._sleeper = sleeper
        self.without_backup = frozenset(without_backup)
        self.lost: frozenset[str] = frozenset()
        self._released: frozenset[str] = frozenset()
        self._waiters: deque[_Waiter] = deque()  # in the order of their arrival
        self.changing = asyncio.Lock()
        # By generation: the ids that callers have aborted; None stands for all ids.
        self._generations: dict[Any, set[str | None]] = {}
        self._ignores_aborts = False
        self._polling: asyncio.Task[frozenset[str]] | None = None
        self._waking: asyncio.Task[bool] | None = None
        self._waking_tags: frozenset[str] = frozenset()
        self._log = RefusalLog()

    @property
    def released(self) -> frozenset[str]:
        """The last known released tags."""
        return self._released

    @property
    def waiting(self) -> int:
        """The number of held requests."""
        return len(self._waiters)

    def learn(self, released: Collection[str]) -> None:
        """Record the released tags, and admit, in order, the requests that need none of them."""
        self._released = frozenset(released)
        if not self._released:
            self._log.awake()
        for waiter in self._waiters:
            if not waiter.needs & self._released and not waiter.admitted.done():
                waiter.admitted.set_result(None)

    async def refresh(self) -> frozenset[str]:
        """Query the engine for the released tags, and return them."""
        released = await self._sleeper.released()
        if released is not None:
            self.learn(released)
        return self._released

    def abort(self, ids: Collection[str], every: bool = False) -> None:
        """Record that a caller aborts all generations, or the generations with these ids.

        Waiting generations fail, and refused ones are not sent again. The engine aborts the others.
        """
        if self._ignores_aborts:
            return
        names = set(ids)
        for request, aborted in self._generations.items():
            aborted.update([None] if every else names.intersection(request.ids))

    @contextlib.contextmanager
    def own_aborts(self) -> Iterator[None]:
        """Ignore aborts during the block.

        memsaver itself causes such aborts before it resends a request. The block must not await.
        """
        self._ignores_aborts = True
        try:
            yield
        finally:
            self._ignores_aborts = False

    @contextlib.contextmanager
    def abortable(self, request: Any, whole: Any = None) -> Iterator[None]:
        """Record aborts of an `admitted.Generation` during the block.

        Args:
            request: the generation.
            whole: the generation that contains `request`, if any; aborting `whole` also aborts
                `request`.
        """
        before = self._generations.get(whole, set())
        self._generations[request] = before.intersection([None, *request.ids])
        try:
            yield
        finally:
            del self._generations[request]

    def check_aborted(self, request: Any) -> None:
        """Raise `RequestAbortedError` if a caller has aborted the generation."""
        if self._generations[request]:
            raise RequestAbortedError("the request was aborted while it waited for the engine")

    def deadline(self) -> float:
        """Return the deadline for a new request's wait, as a time on the event loop's clock."""
        return asyncio.get_running_loop().time() + self.policy.wait_seconds

    async def admit(
        self,
        needs: frozenset[str],
        what: str,
        *,
        deadline: float | None = None,
        reads: bool = True,
        is_gone: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """Wait until the tags that a request needs are mapped; earlier requests are admitted first.

        A request does not wait for an earlier request whose tags are still released.

        Args:
            needs: the tags that the request needs.
            what: the name of the request's operation, for the error message.
            deadline: a result of `deadline()`; None computes the deadline now.
            reads: whether the request reads the tags' contents; False if it only overwrites them.
            is_gone: returns whether the client has disconnected, or raises `RequestAbortedError`.

        Raises:
            EngineAsleepError: a needed tag is released. With "refuse", or if too many requests are
                held, the error is raised immediately. With "wait", it is raised at the deadline.
                With "wake", it is raised if the wake-up fails, with the failure as its cause, or if
                the engine does not answer by the deadline or within 60 s, whichever is later.
            ClientGoneError: the client has disconnected.
            RequestAbortedError: `is_gone` raised it.
        """
        if not self._released & needs and all(one.needs & self._released for one in self._waiters):
            return
        try:
            end = self.deadline() if deadline is None else deadline
            await self._admit(needs, what, end, reads, is_gone)
        except MemsaverError as error:
            self.report(what, error)
            raise
        except asyncio.CancelledError:
            self.report(what, "the request was cancelled while it waited")
            raise

    def report(self, what: str, error: MemsaverError | str) -> None:
        """Log that the engine did not serve a request because its memory is released."""
        if not isinstance(error, EngineAsleepError):
            error = asleep_text(self._released or EVERYTHING, what, str(error))
        self._log.add(str(error))

    async def _admit(
        self,
        needs: frozenset[str],
        what: str,
        deadline: float,
        reads: bool,
        is_gone: Callable[[], Awaitable[bool]] | None,
    ) -> None:
        is_full = len(self._waiters) >= self.policy.most_held
        refuses = self.policy.when_asleep == "refuse"
        if (is_full or refuses) and self._released & needs and await self.refresh() & needs:
            held = f"{len(self._waiters)} requests are held, which is the limit"
            raise self._error(what, held if is_full else "")
        if refuses:
            return
        waiter = _Waiter(needs, before=self._waiters[-1] if self._waiters else None)
        self._waiters.append(waiter)
        try:
            if self.policy.when_asleep == "wait":
                await self._wait(waiter, what, deadline, is_gone)
            else:
                await self._wake(waiter, what, deadline, reads, is_gone)
            await self._follow(waiter, deadline, is_gone)
        finally:
            self._waiters.remove(waiter)
            waiter.left.set_result(None)
            # Later requests may keep this one in memory for a long time, so it drops its references
            # to earlier requests that have left.
            while (earlier := waiter.before) and earlier.left.done():
                waiter.before = earlier.before

    async def _follow(
        self, waiter: _Waiter, deadline: float, is_gone: Callable[[], Awaitable[bool]] | None
    ) -> None:
        """Wait until the deadline for earlier requests whose tags are mapped."""
        now = asyncio.get_running_loop().time
        while (left := deadline - now()) > 0:
            while (one := waiter.before) and (one.left.done() or one.needs & self._released):
                waiter.before = one.before
            if waiter.before is None:
                return
            done, _ = await asyncio.wait([waiter.before.left], timeout=min(left, _POLL_SECONDS))
            if not done:
                await _check_client(is_gone)

    async def _wait(
        self,
        waiter: _Waiter,
        what: str,
        deadline: float,
        is_gone: Callable[[], Awaitable[bool]] | None,
    ) -> None:
        now = asyncio.get_running_loop().time
        while waiter.needs & self._released and not waiter.admitted.done():
            left = deadline - now()
            if left <= 0:
                more = f"no caller woke it up within {self.policy.wait_seconds:g} s"
                raise self._error(what, more)
            await asyncio.wait([waiter.admitted], timeout=min(left, _POLL_SECONDS))
            if waiter.admitted.done():
                return
            await _check_client(is_gone)
            if waiter is self._waiters[0] and (self._polling is None or self._polling.done()):
                # Not awaited, because later requests would be admitted before this one.
                self._polling = asyncio.ensure_future(self.refresh())
                self._polling.add_done_callback(retrieve)

    async def _wake(
        self,
        waiter: _Waiter,
        what: str,
        deadline: float,
        reads: bool,
        is_gone: Callable[[], Awaitable[bool]] | None,
    ) -> None:
        needs, now = waiter.needs, asyncio.get_running_loop().time
        until = max(deadline, now() + _WAKE_SECONDS)
        pause = _FIRST_PAUSE_SECONDS
        while missing := self._released & needs:
            if reads and self._without_contents(needs):
                await self.refresh()
                missing = self._released & needs
                if missing and (lost := self._without_contents(needs)):
                    more = f"{', '.join(sorted(lost))} has no backup: resume it, and load it again"
                    if not missing & lost:
                        more = f"load all of {', '.join(sorted(lost))}, and resume the rest"
                    raise self._error(what, more)
                continue
            is_current = True
            try:
                is_current = await self._wake_once(missing, until, is_gone)
            except (ClientGoneError, RequestAbortedError):
                raise
            except MemsaverError as error:
                more = f"it could not be woken: {error}"
                if not isinstance(error, OutOfDeviceMemoryError) or now() + pause > deadline:
                    raise self._error(what, more) from error
            if not is_current:
                await _check_client(is_gone)
                if now() >= until:
                    more = "other callers changed its memory during each wake-up"
                    raise self._error(what, more)
                continue
            if not self._released & needs:
                return
            if now() + pause > deadline:
                raise self._error(what, "other callers released its memory after each wake-up")
            if waiter.admitted.done():
                waiter.admitted = asyncio.Future()
            await asyncio.wait([waiter.admitted], timeout=pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            await _check_client(is_gone)

    async def _wake_once(
        self,
        tags: frozenset[str],
        until: float,
        is_gone: Callable[[], Awaitable[bool]] | None,
    ) -> bool:
        """Resume tags in a task shared by all requests that currently need a wake-up.

        The wake-up continues even if a request is cancelled or stops waiting. Returns False if the
        recorded state was out of date, or if another request's task resumed only some of the tags.
        """
        now = asyncio.get_running_loop().time
        begun = now()
        if self._waking is None or self._waking.done():
            self._waking_tags = tags
            self._waking = asyncio.ensure_future(self._resume(tags, self._state))
            self._waking.add_done_callback(retrieve)
        waking, has_all = self._waking, tags <= self._waking_tags
        while not waking.done():
            await asyncio.wait([waking], timeout=max(0.0, min(_POLL_SECONDS, until - now())))
            if not waking.done():
                await _check_client(is_gone)
                if now() >= until:
                    raise EngineTimeoutError(
                        f"the engine did not answer the wake-up within {until - begun:.3g} s"
                    )
        return waking.result() and has_all

    def _without_contents(self, needs: frozenset[str]) -> frozenset[str]:
        return needs & (self.lost | self._released & self.without_backup)

    @property
    def _state(self) -> tuple[frozenset[str], ...]:
        return self._released, self.without_backup, self.lost

    async def _resume(self, tags: frozenset[str], known: object) -> bool:
        """Resume tags; if the state is no longer `known`, do nothing and return False.

        After such a change, the tags' contents may have been lost.
        """
        async with self.changing:
            await self.refresh()
            if self._state != known:
                return False
            self.learn(await self._sleeper.resume([tag for tag in RESUME_ORDER if tag in tags]))
            return True

    def _error(self, what: str, more: str = "") -> EngineAsleepError:
        return asleep_error(self._released or EVERYTHING, what, more)


async def _check_client(is_gone: Callable[[], Awaitable[bool]] | None) -> None:
    if is_gone is not None and await is_gone():
        raise ClientGoneError("the client disconnected while its request waited for the engine")
