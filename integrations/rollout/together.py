"""`Together`: what a group's ranks do at once, so that each gets the result, or the same error."""

from __future__ import annotations

import hashlib
import itertools
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from memsaver.distributed.channel import Channel
from memsaver.distributed.errors import GroupError, RankError, RankFailure
from memsaver.errors import ConfigError, InvalidStateError
from memsaver.integrations.rollout.failures import Told, error_of
from memsaver.integrations.rollout.pickles import pack, unpack
from memsaver.interrupts import interrupts_deferred
from memsaver.latches import Gate

__all__ = ["GRACE_SECONDS", "Together", "check_timeout"]

Given = TypeVar("Given")
Result = TypeVar("Result")

# For a leader to find out that its engine does not answer, beside the time that the engine has.
GRACE_SECONDS = 30.0

_LONGEST_SECONDS = 1e7
_RECORD = struct.Struct("<II16sQ")  # protocol, whether it failed, the call's digest, bytes to come
_PROTOCOL = 1
_WORDS = 256  # bytes of a call's words, told where the ranks disagree


class Together:
    """The ranks of a group, of which the first is the leader, for calls that all of them make.

    All make the same calls in the same order. Where one fails on a rank, all raise the same error:
    of the kind that it has there, where it is one of memsaver's and all failures are of that kind,
    else a `RankError`. Its message names the call, the ranks and their reasons, its `failures` are
    as those of a `RankError`, and its cause is the rank's own exception there.

    Nobody waits for ever: a rank that is dead or hangs is a `GroupError` on the others. The group
    is of no more use to them then; other users of the same process group are not concerned.

    Results and errors travel as pickles between the ranks of one job (see pickles.py).
    Calls may run beside each other in several threads where each has its own `Together`; calls of
    one take turns. They use the CPU alone.

    Making one is a collective.

    Args:
        group: a `torch.distributed` group; None, or one of a single rank: this process alone.
        timeout: seconds to wait until all ranks have come to a call.
        lane: a name for calls that go on beside others; the same on all ranks.

    Raises:
        GroupError: not all ranks came to make it in time.
        ConfigError: no such time.
        InvalidStateError, NotLoadedError: as of `memsaver.distributed`.
    """

    def __init__(self, group: Any = None, timeout: float = 600.0, lane: str = "rollout") -> None:
        check_timeout(timeout)
        self._timeout = timeout
        self._turn = Gate()
        self._channel: Channel | None = None
        self._closed = False
        if group is not None:
            channel = Channel(group, f"{lane}/{_number_of(group, lane)}")
            self._ranks, self._rank = channel.ranks, channel.rank
            if len(channel.ranks) > 1:
                channel.connect(timeout, f"the ranks' connection for {lane}")
                self._channel = channel

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the group's first."""
        return self._channel is None or self._rank == self._ranks[0]

    def close(self) -> None:
        """End the connections with the other ranks. Idempotent; waits for none of them.

        Calls after it are an `InvalidStateError`, unless this process is alone.
        """
        if self._channel is not None:
            self._closed = True
            self._channel.close()

    def on_leader(
        self, what: str, action: Callable[[], Result], timeout: float | None = None
    ) -> Result:
        """Do something on the leader, for all.

        Args:
            what: the call in words, the same on all ranks.
            action: called on the leader alone; must end within `timeout`, by an error if need be.
            timeout: seconds that it may take; None is that of this object.

        Returns:
            Its result, on all ranks.
        """
        return self.gathered(what, lambda: None, lambda _: action(), timeout)

    def gather(
        self, what: str, work: Callable[[], Given], timeout: float | None = None
    ) -> list[Given]:
        """Do something on every rank; the results of all in the group's order, on all.

        Args:
            what: the call in words, the same on all ranks.
            work: called on every rank.
            timeout: seconds to wait for the others; None is that of this object.
        """
        if self._channel is None:
            return [work()]
        with self._one_at_a_time(what):
            return self._gather(what, work, self._timeout if timeout is None else timeout)

    def gathered(
        self,
        what: str,
        prepare: Callable[[], Given],
        action: Callable[[list[Given]], Result],
        timeout: float | None = None,
    ) -> Result:
        """`gather` and then `on_leader` with what was gathered, as one call.

        Where `prepare` fails on a rank, `action` is not called.
        """
        if self._channel is None:
            return action([prepare()])
        limit = self._timeout if timeout is None else timeout
        with self._one_at_a_time(what):
            everyones = self._gather(what, prepare, self._timeout)
            return self._of_leader(what, lambda: action(everyones), limit)

    def meet(self, what: str, error: BaseException | None = None) -> None:
        """Wait for all ranks; an error that one of them brings is raised on all.

        Args:
            what: the call in words, the same on all ranks.
            error: what has failed here, or None.
        """

        def work() -> None:
            if error is not None:
                raise error

        self.gather(what, work)

    # --- meetings ---------------------------------------------------------------------------------

    def _one_at_a_time(self, what: str) -> AbstractContextManager[None]:
        if self._closed:
            raise InvalidStateError(f"{what} needs other ranks, and this connection was closed")
        return self._turn.passed(
            self._timeout,
            lambda: InvalidStateError(
                f"{what} waited {self._timeout:g} s for another thread's call on the same group; "
                "nothing was done"
            ),
        )

    def _gather(self, what: str, work: Callable[[], Given], timeout: float) -> list[Given]:
        body, error = _attempt(work)
        with interrupts_deferred():
            bodies = self._exchange(what, body, error, timeout)
        return [unpack(one) for one in bodies]

    def _exchange(
        self, what: str, body: bytes, error: BaseException | None, timeout: float
    ) -> list[bytes]:
        """What each rank brings. Raises where one of them brings an error, or another call."""
        assert self._channel is not None
        if error is not None:
            body = Told.of(self._rank, error).packed()
        mine = _RECORD.pack(_PROTOCOL, error is not None, _digest(what), len(body))
        records = [_RECORD.unpack(one) for one in self._all_gather(mine, what, error, timeout)]
        if len({record[0] for record in records}) > 1 or len({r[2] for r in records}) > 1:
            protocols = [record[0] for record in records]
            raise self._disagreement(what, protocols, error, timeout) from error
        most = max(record[3] for record in records)
        rows = self._all_gather(body.ljust(most, b"\0"), what, error, timeout)
        bodies = [row[: record[3]] for row, record in zip(rows, records, strict=True)]
        failed = [Told.parse(b) for b, r in zip(bodies, records, strict=True) if r[1]]
        if failed:
            self._raise(what, failed, error)
        return bodies

    def _of_leader(self, what: str, action: Callable[[], Result], timeout: float) -> Result:
        """The leader's result. The others wait as long as it may take, and a little more."""
        assert self._channel is not None
        channel, limit = self._channel, timeout + GRACE_SECONDS
        body, error = _attempt(action) if self.is_leader else (b"", None)
        if error is not None:
            body = Told.of(self._rank, error).packed()
        with interrupts_deferred():
            try:
                head = _RECORD.pack(_PROTOCOL, error is not None, _digest(what), len(body))
                head = channel.broadcast(head, _RECORD.size, limit, what)
                _, failed, _, length = _RECORD.unpack(head)
                body = channel.broadcast(body, length, limit, what)
            except GroupError as lost:
                raise _worse(lost, error) from lost.__cause__
        if failed:
            self._raise(what, [Told.parse(body)], error)
        result: Result = unpack(body)
        return result

    def _all_gather(
        self, mine: bytes, what: str, error: BaseException | None, timeout: float
    ) -> list[bytes]:
        assert self._channel is not None
        try:
            return self._channel.all_gather(mine, timeout, what)
        except GroupError as lost:
            raise _worse(lost, error) from lost.__cause__

    def _raise(self, what: str, failed: Sequence[Told], own: BaseException | None) -> None:
        if own is not None and not isinstance(own, Exception):
            raise own  # an interrupt, or the process's exit, is for this rank alone
        raise error_of(what, failed, len(self._ranks)) from own

    def _disagreement(
        self, what: str, protocols: Sequence[int], error: BaseException | None, timeout: float
    ) -> RankError:
        words = what.encode("utf-8", "replace")[:_WORDS].ljust(_WORDS, b"\0")
        told = self._all_gather(words, what, error, timeout)
        calls = [one.rstrip(b"\0").decode("utf-8", "ignore") for one in told]
        failures = {
            rank: RankFailure(rank, "", "", "", "", f"{call} (protocol {protocol})")
            for rank, call, protocol in zip(self._ranks, calls, protocols, strict=True)
        }
        each = "; ".join(f"rank {rank}: {one.message}" for rank, one in failures.items())
        made = RankError(f"the ranks of a group must make the same call: {each}; nothing was done")
        made.failures, made.stuck = failures, {}
        return made


def check_timeout(timeout: object, name: str = "timeout") -> None:
    """Raise `ConfigError` where it is no positive number of seconds, which a wait may take."""
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not number or not 0 < float(timeout) <= _LONGEST_SECONDS:  # type: ignore[arg-type]
        raise ConfigError(f"{name} is a positive number of seconds, not {timeout!r}")


def _attempt(work: Callable[[], Any]) -> tuple[bytes, BaseException | None]:
    """The packed result of some work, or what it raised."""
    try:
        return pack(work()), None
    except BaseException as error:
        return b"", error


def _worse(lost: GroupError, error: BaseException | None) -> GroupError:
    """The lost group, with what this rank would have told."""
    if error is not None:
        lost.message += f"; this rank had failed itself: {type(error).__name__}: {error}"
    return lost


def _digest(what: str) -> bytes:
    return hashlib.blake2b(what.encode("utf-8", "replace"), digest_size=16).digest()


def _number_of(group: Any, lane: str) -> int:
    """Counts what is made for a group and a lane: the same on all ranks, as they make the same."""
    with _lock:
        counters = _counters.setdefault(group, {})
        number: int = next(counters.setdefault(lane, itertools.count()))
        return number


_lock = threading.Lock()
_counters: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
