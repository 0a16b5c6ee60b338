"""`Together`: what a group's ranks do at once, so that each gets the result, or the same error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from memsaver.distributed.attempts import Outcomes, Ranks
from memsaver.distributed.channel import Channel
from memsaver.distributed.invalid_groups import awaited_channel, channel_of
from memsaver.errors import InvalidStateError, MemsaverError
from memsaver.integrations.rollout.failures import Told, error_of
from memsaver.integrations.rollout.pickles import PICKLES
from memsaver.interrupts import interruptible, signals_deferred
from memsaver.latches import Gate
from memsaver.timeouts import check_timeout, is_timeout

__all__ = ["GRACE_SECONDS", "Together", "refuse"]

Given = TypeVar("Given")
Result = TypeVar("Result")

# For a leader to find out that its engine does not answer, beside the time that the engine has.
GRACE_SECONDS = 30.0

_SECONDS = 600.0  # that ranks wait for each other unless somebody says otherwise


class Together:
    """The ranks of a group, of which the first is the leader, for calls that all of them make.

    All make the same calls in the same order. Where one fails on a rank, all raise the same error:
    of the kind that it has there, where it is one of memsaver's and all failures are of that kind,
    else a `RankError`. Its message names the call, the ranks and their reasons, its `failures` are
    as those of a `RankError`, and its cause is the rank's own exception there.

    Nobody waits for ever: a rank that is dead or hangs is a `GroupError` on the others when the
    timeout is over. The group is of no more use to them then; other users of the same process group
    are not concerned.

    An interrupt (Ctrl-C) or an exit on one rank is a `RankError` on the others, and is raised again
    on its own rank. One that comes while the ranks exchange results is raised there at the end of
    the call, which the others may have completed.

    Results and errors travel as pickles between the ranks of one job (see pickles.py). A result
    that one rank cannot unpickle is an error on all.
    Calls may run beside each other in several threads where each has its own `Together`; calls of
    one take turns. They use the CPU alone.

    Making one is a collective, which fails on all ranks if an argument is invalid on one of them.

    Args:
        group: a `torch.distributed` group; None, or one of a single rank: this process alone.
        timeout: seconds to wait until all ranks have come to a call.
        lane: a name for calls that go on beside others; the same on all ranks.
        refused: what has failed on this rank already, to be raised on all ranks; or None.
        following: the number of collectives that make one, and that follow this one even if it
            fails. For a rank that cannot tell (see `refuse`).

    Raises:
        GroupError: not all ranks came to make it in time.
        ConfigError: a bad group or timeout on some rank. A rank with a bad group looks for the
            group on which others wait for it, at most for `timeout`.
        InvalidStateError, NotLoadedError: see `memsaver.distributed`. A rank that is not in the
            group raises the error alone; ranks that wait for it there wait until `timeout`.
    """

    def __init__(
        self,
        group: Any = None,
        timeout: float = _SECONDS,
        lane: str = "rollout",
        *,
        refused: BaseException | None = None,
        following: int = 0,
    ) -> None:
        self._turn = Gate()
        self._ranks: Ranks | None = None
        self._channel: Channel | None = None
        self._closed = False
        self._is_leader = True
        self._timeout = timeout if is_timeout(timeout) else _SECONDS
        invalid_group: MemsaverError | None = None

        def check() -> int:
            for error in (refused, invalid_group):
                if error is not None:
                    raise error
            check_timeout(timeout)
            return following

        if group is None:
            check()
            return
        with signals_deferred():
            channel, invalid_group = channel_of(group, _making(lane), self._timeout, lane)
            self._is_leader = channel.rank == channel.ranks[0]
            if len(channel.ranks) > 1:
                self._channel, self._ranks = channel, Ranks(channel)
            try:
                _values(_connected(channel, self._timeout, check))
            except BaseException:
                self.close()
                raise

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the group's first."""
        return self._is_leader

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
        if self._ranks is None:
            return [interruptible(work)]
        with self._one_at_a_time(what) as ranks:
            limit = self._timeout if timeout is None else timeout
            return _values(ranks.attempt(what, work, timeout=limit, codec=PICKLES))

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
        if self._ranks is None:
            given = [interruptible(prepare)]
            return interruptible(lambda: action(given))
        with self._one_at_a_time(what) as ranks:
            gathered = ranks.attempt(what, prepare, timeout=self._timeout, codec=PICKLES)
            everyones = _values(gathered)

            def of_leader() -> Result | None:
                return action(everyones) if self._is_leader else None

            # The others wait as long as the action may take, and a little more.
            limit = (self._timeout if timeout is None else timeout) + GRACE_SECONDS
            done = ranks.attempt(
                what, of_leader, timeout=limit, codec=PICKLES, step="by the leader"
            )
            results = _values(done)
            return results[0]  # type: ignore[return-value]

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

    @contextlib.contextmanager
    def _one_at_a_time(self, what: str) -> Iterator[Ranks]:
        """For the block, no other thread makes a call, and signals are handled in its attempts."""
        if self._closed:
            raise InvalidStateError(f"{what} needs other ranks, and this connection was closed")
        assert self._ranks is not None
        late = InvalidStateError(
            f"{what} waited {self._timeout:g} s for another thread's call on the same group; "
            "nothing was done"
        )
        with self._turn.passed(self._timeout, lambda: late), signals_deferred():
            yield self._ranks


def _values(outcomes: Outcomes[Given]) -> list[Given]:
    """The values of all ranks; raises the error of those that failed, the same on all ranks."""
    values: list[Given] = outcomes.values(_error_of)
    return values


def _error_of(outcomes: Outcomes[Any]) -> MemsaverError:
    if outcomes.calls:
        return outcomes.error("nothing was done")
    told = [Told(one.failure, one.error) for one in outcomes.each if one.failure is not None]
    error: MemsaverError = error_of(outcomes.what, told, len(outcomes.each))
    return error


def refuse(error: Exception, timeout: float, lanes: Sequence[str]) -> NoReturn:
    """Raise an error of this rank's arguments on all ranks that are about to make a `Together`.

    For a rank that does not know its groups. It looks for the ranks that wait for it, and takes
    part in as many of their collectives as they say.

    Args:
        error: the error. Raised for this rank alone if torch.distributed is not initialised.
        timeout: seconds to look, for each collective; ignored if invalid.
        lanes: the lanes that the others may make.

    Raises:
        MemsaverError: the error, as all ranks raise it.
        GroupError: no other rank waited for this one in time, or a rank is gone.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        raise error

    def work() -> int:
        raise error

    raised: BaseException | None = None
    limit = timeout if is_timeout(timeout) else _SECONDS
    left = 1
    with signals_deferred():
        while left:
            channel = awaited_channel(error, "a collective call", limit, lanes)
            try:
                outcomes = _connected(channel, limit, work)
            finally:
                channel.close()
            try:
                _values(outcomes)
            except BaseException as told:
                raised = raised or told
            left = max((one.value for one in outcomes.each if one.value is not None), default=0)
        raise raised or error


def _making(lane: str) -> str:
    return f"the ranks' connection for {lane}"


def _connected(channel: Channel, timeout: float, work: Callable[[], int]) -> Outcomes[int]:
    """Connect a channel's ranks and do the work on each. A collective."""
    what = _making(channel.lane)
    several = len(channel.ranks) > 1
    if several:
        channel.connect(timeout, what)
    ranks = Ranks(channel if several else None)
    return ranks.attempt(what, work, timeout=timeout, codec=PICKLES)
