"""Attempts, in which every rank of a group does some work and receives all ranks' outcomes.

Every rank does its part and then sends its outcome, even after an interrupt, so no rank waits for a
rank that failed. All ranks receive the same outcomes, so they can make the same decision.
Integrations use this module with their own codecs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from memsaver._runtime.interrupts import interruptible, signals_deferred
from memsaver.distributed.channel import Channel
from memsaver.distributed.errors import GroupError, RankError, RankFailure, disagreed, failed
from memsaver.distributed.messages import NOTHING, Codec, FailureRecord, Header, text_of

__all__ = ["Outcome", "Outcomes", "Ranks"]

Value = TypeVar("Value")


@dataclass(frozen=True)
class Outcome(Generic[Value]):
    """The outcome of an attempt on one rank.

    Attributes:
        rank: the rank in the world.
        value: the result of the rank's work. None if the work failed, or if the attempt failed on
            another rank and this rank cannot read the value.
        failure: a description of the exception, or None.
        error: the exception as the codec transmitted it, or None. Each rank has its own object.
    """

    rank: int
    value: Value | None = None
    failure: RankFailure | None = None
    error: Any = None


@dataclass(frozen=True)
class Outcomes(Generic[Value]):
    """The outcomes of an attempt on all ranks.

    Attributes:
        what: a description of the call.
        each: the outcomes, in the group's rank order; empty if `calls` is not empty.
        own: the exception that this rank's own work raised, or None.
        calls: each rank's call, if the ranks made different calls and none of them failed;
            otherwise empty.
    """

    what: str
    each: tuple[Outcome[Value], ...]
    own: BaseException | None = None
    calls: dict[int, RankFailure] = field(default_factory=dict)

    @property
    def failures(self) -> dict[int, RankFailure]:
        """The failures by rank."""
        return {one.rank: one.failure for one in self.each if one.failure is not None}

    @property
    def is_good(self) -> bool:
        """Whether the ranks made the same call and it failed on none of them."""
        return not self.calls and not self.failures

    def error(self, after: str) -> RankError:
        """Return the error for all ranks.

        Args:
            after: a description of the state after the failure, with advice.
        """
        if self.calls:
            return disagreed(self.calls, after)
        return failed(self.what, len(self.each), self.failures, after)

    def check_agreed(self) -> None:
        """Raise a `RankError` if the ranks made different calls.

        If this rank's own work raised KeyboardInterrupt or SystemExit, the method raises that
        exception instead.
        """
        if self.own is not None and not isinstance(self.own, Exception):
            raise self.own
        if self.calls:
            raise self.error("nothing was changed")

    def values(self, error_of: Callable[[Outcomes[Value]], BaseException]) -> list[Value]:
        """Return the values of all ranks.

        Raises:
            BaseException: the attempt failed on a rank. If this rank's own work raised
                KeyboardInterrupt or SystemExit, that exception is raised, otherwise the exception
                that `error_of` returns.
        """
        if self.is_good:
            return [one.value for one in self.each]  # type: ignore[misc]
        error = error_of(self)
        if self.own is not None and not isinstance(self.own, Exception):
            raise self.own from error
        raise error from self.own


class Ranks:
    """The ranks of a channel, which must make the same attempts in the same order.

    Only one thread at a time may use the object. An attempt has at most five exchanges. Each
    exchange exceeds its timeout by at most a few seconds.

    Args:
        channel: the channel that connects the ranks, or None if this process is the only rank. A
            channel with only one rank is not used.
    """

    def __init__(self, channel: Channel | None) -> None:
        self.ranks: list[int] = channel.ranks if channel is not None else [0]
        self.rank: int = channel.rank if channel is not None else 0
        self._channel = channel if len(self.ranks) > 1 else None

    def attempt(
        self,
        what: str,
        work: Callable[[], Value],
        *,
        timeout: float | None = None,
        codec: Codec = NOTHING,
        step: str = "",
        uninterrupted: bool = False,
    ) -> Outcomes[Value]:
        """Run the work on this rank, and return the outcomes on all ranks. A collective.

        Any exception that the work raises becomes an outcome. If a signal arrives after the
        enclosing `signals_deferred` block was entered, an exception from its handler also becomes
        an outcome. If a signal arrives during the exchange, its handler runs at the end of the
        outermost such block.

        Args:
            what: a description of the call, the same on all ranks.
            work: this rank's part.
            timeout: seconds to wait for the other ranks in an exchange; None means the group's own
                timeout.
            codec: the codec for the work's values.
            step: the name of the call's step. The ranks compare this name as well as `what`.
            uninterrupted: whether signal handlers are also deferred during the work.

        Raises:
            GroupError: a rank died, hung, or did not make the call in time.
        """
        with signals_deferred():
            value: Value | None = None
            body, own = b"", None
            try:
                value = work() if uninterrupted else interruptible(work)
                body = codec.pack(value) if value is not None else b""
            except BaseException as error:
                own = error
            try:
                if self._channel is None:
                    return _alone(self.rank, what, value, own, codec)
                return _Attempt(self._channel, what, step, timeout, codec).outcomes(body, own)
            except GroupError as lost:
                if own is None:
                    raise
                lost.message += (
                    f"; this rank's own work had failed before: {type(own).__name__}: "
                    f"{text_of(own)}"
                )
                if not isinstance(own, Exception):
                    raise own from lost  # interrupts are never dropped
                raise
            finally:
                own = None  # its traceback refers to this frame, and to the work's tensors


class _Attempt:
    """The exchanges of one attempt."""

    def __init__(
        self, channel: Channel, what: str, step: str, timeout: float | None, codec: Codec
    ) -> None:
        self._channel = channel
        self._what = what
        self._step = step
        self._timeout = timeout
        self._codec = codec

    def outcomes(self, body: bytes, own: BaseException | None) -> Outcomes[Any]:
        headers = self._headers(self._step, body, own)
        if not _are_good(headers):
            return self._bad(headers, body, own)
        bodies = self._bodies(headers, body)
        values: list[Any] = []
        try:
            values = [self._codec.unpack(one) if one else None for one in bodies]
        except BaseException as error:
            own = error
        if self._codec.confirmed and any(bodies):
            headers = self._headers(f"{self._step} received", b"", own)
            if not _are_good(headers):
                return self._bad(headers, body, own)
        elif own is not None:
            raise own
        pairs = zip(self._channel.ranks, values, strict=True)
        return Outcomes(self._what, tuple(Outcome(rank, value) for rank, value in pairs))

    def _headers(self, step: str, body: bytes, own: BaseException | None) -> list[Header]:
        mine = Header.of(self._what, step, body, own is not None).packed()
        return [Header.parse(one) for one in self._gather(mine)]

    def _bodies(self, headers: list[Header], body: bytes) -> list[bytes]:
        sizes = [header.body_bytes for header in headers]
        if max(sizes) <= Header.INLINE_BYTES:
            return [header.inline for header in headers]
        senders = [place for place, size in enumerate(sizes) if size]
        if len(senders) == 1:  # a broadcast, because a leader's result can be large
            bodies = [b""] * len(sizes)
            bodies[senders[0]] = self._channel.broadcast(
                body, sizes[senders[0]], self._timeout, self._what, root=senders[0]
            )
            return bodies
        rows = self._gather(body.ljust(max(sizes), b"\0"))
        return [row[:size] for row, size in zip(rows, sizes, strict=True)]

    def _bad(self, headers: list[Header], body: bytes, own: BaseException | None) -> Outcomes[Any]:
        """Return the outcomes of an attempt that failed, or in which the ranks made different
        calls.
        """
        ranks = self._channel.ranks
        if len({header.protocol for header in headers}) > 1:
            return Outcomes(self._what, (), own, _versions(ranks, headers))
        has_failed = any(header.failed for header in headers)
        # The steps may differ even though the calls are equal, if several threads use the group at
        # once.
        what = self._what if has_failed or not self._step else f"{self._what}, {self._step}"
        extra = _packed_error(own, self._codec) if own is not None else body
        mine = FailureRecord.of(own, what).packed(extra)
        sizes = self._headers("account", mine, None)
        records, extras = zip(*map(FailureRecord.parse, self._bodies(sizes, mine)), strict=True)
        if not has_failed:
            calls = {rank: one.call(rank) for rank, one in zip(ranks, records, strict=True)}
            return Outcomes(what, (), own, calls)
        each: list[Outcome[Any]] = []
        descriptions = [records[0].what]
        for rank, header, record, extra in zip(ranks, headers, records, extras, strict=True):
            if header.failed:
                error = _read(self._codec.unpack_error, extra)
                each.append(Outcome(rank, None, record.failure(rank), error))
            else:
                each.append(Outcome(rank, _read(self._codec.unpack, extra)))
                descriptions.append(record.what)  # a failed rank may have made a different call
        return Outcomes(descriptions[-1], tuple(each), own)

    def _gather(self, mine: bytes) -> list[bytes]:
        return self._channel.all_gather(mine, self._timeout, self._what)


def _alone(
    rank: int, what: str, value: Any, own: BaseException | None, codec: Codec
) -> Outcomes[Any]:
    if own is None:
        return Outcomes(what, (Outcome(rank, value),))
    failure = FailureRecord.of(own, what).failure(rank)
    error = _read(codec.unpack_error, _packed_error(own, codec))
    return Outcomes(what, (Outcome(rank, None, failure, error),), own)


def _packed_error(own: BaseException, codec: Codec) -> bytes:
    try:
        return codec.pack_error(own)
    except BaseException:  # only its text is sent
        return b""


def _read(unpack: Callable[[bytes], Any], data: bytes) -> Any:
    """Unpack another rank's value. Return the value, or None if this rank cannot read it."""
    try:
        return unpack(data) if data else None
    except BaseException:
        return None


def _are_good(headers: list[Header]) -> bool:
    same = all(header.call == headers[0].call for header in headers)
    return same and not any(header.failed for header in headers)


def _versions(ranks: list[int], headers: list[Header]) -> dict[int, RankFailure]:
    from memsaver import __version__

    advice = f"install one version of memsaver on all ranks (this rank has {__version__})"
    return {
        rank: RankFailure(rank, "", "", "", "", f"uses protocol {header.protocol}; {advice}")
        for rank, header in zip(ranks, headers, strict=True)
    }
