"""`Together`: collective calls of a group's ranks that have the same outcome on all ranks."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from memsaver._runtime.interrupts import interruptible, signals_deferred
from memsaver._runtime.latches import Gate
from memsaver._runtime.timeouts import check_timeout, is_timeout
from memsaver.distributed.attempts import Outcomes, Ranks
from memsaver.distributed.channel import Channel
from memsaver.distributed.invalid_groups import AwaitedChannels, channel_of
from memsaver.errors import InvalidStateError, MemsaverError

from .failures import SerializedError, error_of
from .pickles import PICKLES

__all__ = ["GRACE_SECONDS", "Connection", "Together", "refuse"]

# A connection that each rank of a mesh opens in a call, unless its group has only one rank. The
# tuple contains the connection's lane, and the ranks of each group along one dimension of the mesh.
Connection = tuple[str, Sequence[Sequence[int]]]
Given = TypeVar("Given")
Result = TypeVar("Result")

# Additional time for a leader to detect that its engine does not answer.
GRACE_SECONDS = 30.0

_SECONDS = 600.0  # the default time that ranks wait for each other


class Together:
    """Collective calls of a group's ranks. The group's first rank is the leader.

    All ranks must make the same calls in the same order. If a call fails on a rank, all ranks raise
    the same error. If all failures are memsaver errors of one class, the error is of that class;
    otherwise, the error is a `RankError`. The error's message names the call, the ranks that failed
    and the reasons, and its attribute `failures` maps ranks to their failures. On a rank that
    failed, the error's cause is the rank's own exception.

    Every wait is bounded: if a rank dies or hangs, the other ranks raise `GroupError` after the
    timeout. After this error, the object cannot be used; other users of the process group are
    unaffected.

    An interrupt (Ctrl-C) or an exit on one rank raises `RankError` on all other ranks, and is
    raised again on the interrupted rank. An interrupt during the exchange of results is raised at
    the end of the call; the call might have succeeded on the other ranks.

    Results and errors are pickled for the other ranks of the job (see pickles.py). If one rank
    cannot unpickle a result, all ranks raise an error.

    Several threads can make calls concurrently if each thread uses its own `Together`; calls on one
    object are serialized. The calls use only the CPU.

    The constructor is a collective call that fails on all ranks if an argument is invalid on any
    rank.

    Attributes:
        is_leader: whether this rank is the group's first.

    Args:
        group: a `torch.distributed` group; None or a group of one rank means only this process.
        timeout: seconds to wait for all ranks to make a call.
        lane: a name that separates these calls from concurrent ones; the same on all ranks.
        refused: an earlier failure of this rank, or None. A failure is raised on all ranks.
        call: the list of all connections that each rank opens in the same call, in this order, even
            after a connection fails. Ranks that do not know their groups read this list from
            torch's store (see `refuse`). Empty if the connections are unknown.

    Raises:
        GroupError: not all ranks made the call within `timeout`.
        ConfigError: a rank passed an invalid group or timeout. A rank with an invalid group spends
            at most `timeout` searching for the group in which other ranks are waiting for it.
        InvalidStateError, NotLoadedError: see `memsaver.distributed`. If a rank is not in the
            group, only that rank raises the error; any rank that expects its call waits until
            `timeout`.
    """

    def __init__(
        self,
        group: Any = None,
        timeout: float = _SECONDS,
        lane: str = "rollout",
        *,
        refused: BaseException | None = None,
        call: Sequence[Connection] = (),
    ) -> None:
        self._gate = Gate()
        self._ranks: Ranks | None = None
        self._channel: Channel | None = None  # until `close`
        self.is_leader = True
        self._timeout = timeout if is_timeout(timeout) else _SECONDS
        invalid_group: MemsaverError | None = None

        def check() -> None:
            for error in (refused, invalid_group):
                if error is not None:
                    raise error
            check_timeout(timeout)

        if group is None:
            check()
            return
        with signals_deferred():
            channel, invalid_group = channel_of(group, _making(lane), self._timeout, lane)
            self.is_leader = channel.rank == channel.ranks[0]
            if len(channel.ranks) > 1:
                self._channel, self._ranks = channel, Ranks(channel)
            try:
                _connect(channel, self._timeout, check, call)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Close the connections to the other ranks, without waiting. Idempotent.

        Later calls raise `InvalidStateError`, unless this process is the only rank.
        """
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def on_leader(
        self, what: str, action: Callable[[], Result], timeout: float | None = None
    ) -> Result:
        """Run `action` on the leader, and return its result on all ranks.

        Args:
            what: a description of the call, the same on all ranks.
            action: a function that is called only on the leader; it must return or raise within
                `timeout`.
            timeout: the time limit for `action` in seconds; None means this object's timeout.
        """
        return self.gathered(what, lambda: None, lambda _: action(), timeout)

    def gather(
        self,
        what: str,
        work: Callable[[], Given],
        timeout: float | None = None,
        *,
        uninterrupted: bool = False,
    ) -> list[Given]:
        """Run `work` on every rank, and return all results in the group's order on every rank.

        Args:
            what: a description of the call, the same on all ranks.
            work: a function that is called on every rank.
            timeout: seconds to wait for the other ranks; None means this object's timeout.
            uninterrupted: whether signal handlers are deferred while `work` runs.
        """
        if self._ranks is None:
            return [work() if uninterrupted else interruptible(work)]
        with self._one_at_a_time(what) as ranks:
            limit = self._timeout if timeout is None else timeout
            return _values(
                ranks.attempt(what, work, timeout=limit, codec=PICKLES, uninterrupted=uninterrupted)
            )

    def gathered(
        self,
        what: str,
        prepare: Callable[[], Given],
        action: Callable[[list[Given]], Result],
        timeout: float | None = None,
    ) -> Result:
        """Run `gather`, then `on_leader` with its results, as one call.

        If `prepare` fails on any rank, `action` is not called.
        """
        if self._ranks is None:
            given = [interruptible(prepare)]
            return interruptible(lambda: action(given))
        with self._one_at_a_time(what) as ranks:
            gathered = ranks.attempt(what, prepare, timeout=self._timeout, codec=PICKLES)
            everyones = _values(gathered)

            def of_leader() -> Result | None:
                return action(everyones) if self.is_leader else None

            # The other ranks wait slightly longer than the action may take.
            limit = (self._timeout if timeout is None else timeout) + GRACE_SECONDS
            done = ranks.attempt(
                what, of_leader, timeout=limit, codec=PICKLES, step="by the leader"
            )
            results = _values(done)
            return results[0]  # type: ignore[return-value]

    def wait(self, what: str, error: BaseException | None = None) -> None:
        """Wait for all ranks; if any rank passes an error, raise an error on all ranks.

        Args:
            what: a description of the call, the same on all ranks.
            error: this rank's failure, or None.
        """

        def work() -> None:
            if error is not None:
                raise error

        self.gather(what, work)

    @contextlib.contextmanager
    def _one_at_a_time(self, what: str) -> Iterator[Ranks]:
        """Exclude other threads' calls during the block; handle signals only in `Ranks.attempt`."""
        if self._channel is None:
            raise InvalidStateError(f"{what} needs other ranks, and this connection was closed")
        assert self._ranks is not None
        late = InvalidStateError(
            f"{what} waited {self._timeout:g} s for another thread's call on the same group; "
            "nothing was done"
        )
        with self._gate.passed(self._timeout, lambda: late), signals_deferred():
            yield self._ranks


def _values(outcomes: Outcomes[Given]) -> list[Given]:
    """Return the values of all ranks; if any rank failed, raise the same error on all ranks."""
    return outcomes.values(_error_of)


def _error_of(outcomes: Outcomes[Any]) -> MemsaverError:
    if outcomes.calls:
        return outcomes.error(
            "nothing was done; make the collective calls in the same order on all ranks, from one "
            "thread per rank"
        )
    errors = [
        SerializedError(one.failure, one.error) for one in outcomes.each if one.failure is not None
    ]
    return error_of(outcomes.what, errors, len(outcomes.each))


def refuse(error: Exception, timeout: float, lanes: Sequence[str]) -> NoReturn:
    """Raise this rank's argument error on all ranks that are about to create a `Together`.

    Call this function on a rank that does not know its groups. The function finds another rank that
    waits for this rank, reads the list of the call's connections from torch's store, and joins the
    connections of this rank's own groups. All of these connections must be joined, in the same
    order as on the other ranks, because a slow rank might be waiting on an earlier connection than
    a fast rank.

    Args:
        error: the error, which is raised only on this rank if torch.distributed is not initialized.
        timeout: the time limit in seconds for the search for a waiting rank, and for the wait for
            the ranks of each connection; 600 if the value is invalid.
        lanes: the lanes that the other ranks might use.

    Raises:
        MemsaverError: a connection failed. All ranks of the first connection that failed raise the
            same error; its message contains the message of `error`.
        GroupError: no other rank waited for this rank within the time limit, or a rank died.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        raise error

    def fail() -> None:
        raise error

    raised: BaseException | None = None
    limit = timeout if is_timeout(timeout) else _SECONDS
    with signals_deferred():
        awaited = AwaitedChannels(lanes)
        try:
            first = awaited.find_waiting(error, "a collective call", limit)
            channels, call = _own_connections(awaited, first)
            for channel in channels:
                try:
                    _connect(channel, limit, fail, call)
                except BaseException as shared:
                    if raised is None or not isinstance(shared, Exception):
                        raised = shared
        finally:
            awaited.close()
        raise raised or error


def _own_connections(
    awaited: AwaitedChannels, first: Channel
) -> tuple[list[Channel], Sequence[Connection]]:
    """Return this rank's channels in a call, and the call, given a channel that a rank waits on."""
    with contextlib.suppress(RuntimeError):  # the store does not answer: join only `first`
        if text := first.published():
            call: Sequence[Connection] = json.loads(text)
            own = (
                awaited.for_ranks(ranks, lane)
                for lane, groups in call
                for ranks in groups
                if first.rank in ranks
            )
            return [channel for channel in own if channel is not None], call
    return [first], ()


def _making(lane: str) -> str:
    return f"the ranks' connection for {lane}"


def _connect(
    channel: Channel, timeout: float, check: Callable[[], None], call: Sequence[Connection]
) -> None:
    """Connect the ranks of a channel, and run `check` on each rank. A collective.

    Args:
        channel: the channel, which remains open.
        timeout: seconds to wait for the other ranks.
        check: a function that raises an exception if this rank cannot make the call.
        call: see `Together`.

    Raises:
        MemsaverError: a check failed; the error is the same on all ranks. See `Together`.
        GroupError: not all ranks made the call within `timeout`.
    """
    what = _making(channel.lane)
    several = len(channel.ranks) > 1
    if several:
        if call:
            with contextlib.suppress(RuntimeError):  # `connect` reports it
                channel.publish(json.dumps(call))
        channel.connect(timeout, what)
    outcomes = Ranks(channel).attempt(what, check, timeout=timeout, codec=PICKLES)
    if call and several and channel.rank == channel.ranks[0]:
        with contextlib.suppress(RuntimeError):
            channel.unpublish()
    _values(outcomes)
