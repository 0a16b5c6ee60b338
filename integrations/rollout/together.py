"""`Together`: collective calls of a group's ranks, with the same outcome on all of them."""

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

# A connection that each rank of a mesh opens in a call, unless its group has only one rank: its
# lane, and the ranks of each group along this dimension of the mesh.
Connection = tuple[str, Sequence[Sequence[int]]]
Given = TypeVar("Given")
Result = TypeVar("Result")

# Additional time for a leader to detect that its engine does not answer.
GRACE_SECONDS = 30.0

_SECONDS = 600.0  # the default time for which ranks wait for each other


class Together:
    """Collective calls of a group's ranks. The group's first rank is the leader.

    All ranks make the same calls in the same order. If a call fails on a rank, all ranks raise the
    same error: an error of the failures' class if all failures are memsaver errors of one class,
    otherwise a `RankError`. Its message names the call, the ranks and their reasons, it has the
    `failures` of a `RankError`, and on a rank that failed its cause is the rank's own exception.

    Every wait is bounded: if a rank died or hangs, the others raise `GroupError` after the timeout.
    They cannot use this object afterwards; other users of the process group are unaffected.

    An interrupt (Ctrl-C) or an exit on one rank raises `RankError` on the others, and is raised
    again on its own rank. An interrupt during the exchange of results is raised at the end of the
    call, which the other ranks may have completed.

    Results and errors are pickled for the other ranks of the job (see pickles.py). A result that
    one rank cannot unpickle is an error on all ranks.

    Calls in several threads may run concurrently if each thread has its own `Together`; calls of
    one object are serialised. The calls use only the CPU.

    The constructor is a collective call, which fails on all ranks if an argument is invalid on one
    of them.

    Attributes:
        is_leader: whether this rank is the group's first.

    Args:
        group: a `torch.distributed` group; None, or a group of one rank, means this process alone.
        timeout: seconds to wait for all ranks to make a call.
        lane: a name that separates these calls from concurrent ones; the same on all ranks.
        refused: an earlier failure of this rank, to be raised on all ranks; or None.
        call: all connections that each rank opens in the same call, in this order, even after one
            of them fails. Ranks that do not know their groups read this list in torch's store (see
            `refuse`). Empty if it is unknown.

    Raises:
        GroupError: not all ranks made the call within `timeout`.
        ConfigError: an invalid group or timeout on a rank. A rank with an invalid group looks
            for the group on which others wait for it, at most for `timeout`.
        InvalidStateError, NotLoadedError: see `memsaver.distributed`. Only a rank that is not in
            the group raises the error; ranks that wait for this rank wait until `timeout`.
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
        """Close the connections to the other ranks. Idempotent; does not wait for them.

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
            action: called only on the leader; must return or raise within `timeout`.
            timeout: the limit for `action` in seconds; None means this object's timeout.
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
        """Run `work` on every rank, and return all results, in the group's order, on all ranks.

        Args:
            what: a description of the call, the same on all ranks.
            work: called on every rank.
            timeout: seconds to wait for the others; None means this object's timeout.
            uninterrupted: whether signal handlers are deferred during the work.
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
        """Wait for all ranks, and raise on all of them if one passes an error.

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
        """Exclude other threads' calls during the block; handle signals only in its attempts."""
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
    """Return the values of all ranks; if ranks failed, raise the same error on all of them."""
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

    Called on a rank that does not know its groups. This rank finds another rank that waits for it,
    reads the list of the call's connections in torch's store, and joins those of its own groups. It
    joins all of them, in the order of all ranks, because a slow rank may wait on an earlier
    connection than a fast one.

    Args:
        error: the error. Raised only on this rank if torch.distributed is not initialised.
        timeout: seconds to search for a waiting rank, and to wait for the ranks of each connection;
            600 if the value is invalid.
        lanes: the lanes that the other ranks may use.

    Raises:
        MemsaverError: the error of the first connection that failed, which the ranks of this
            connection also raise; its text contains that of `error`.
        GroupError: no other rank waited for this one in time, or a rank died.
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
    """Return this rank's channels in a call, given one on which a rank waits, and the call."""
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
        check: raises if this rank cannot make the call.
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
