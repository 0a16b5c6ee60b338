"""One call on all ranks: agreed on, begun, done, and where a rank fails, undone.

Each step ends with a meeting: every rank tells how it fared, and all read the same answers, so all
decide alike. What failed is told in a second meeting, when one did.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from memsaver.distributed import messages
from memsaver.distributed.channel import Channel
from memsaver.distributed.errors import (
    GroupError,
    RankError,
    RankFailure,
    disagreed,
    failed,
)
from memsaver.distributed.messages import Account, Record
from memsaver.distributed.reports import GroupReport, RankFigures
from memsaver.distributed.rollback import Rollback
from memsaver.errors import ConfigError, MemsaverError, MemsaverWarning
from memsaver.handles import Call
from memsaver.interrupts import interrupts_deferred
from memsaver.native import _C, emit_warnings
from memsaver.reports import Report

__all__ = ["together"]

_CHECKED, _BEGUN, _DONE = "checked", "begun", "done"  # the steps

Result = TypeVar("Result")


def together(
    what: str, prepare: Callable[[], Call], group: Any, timeout: float | None
) -> GroupReport:
    """Do a call on every rank of the group, or on none.

    Args:
        what: the call in words, the same on all ranks: those that say otherwise are refused.
        prepare: checks the arguments and makes this rank's call. Changes nothing.
        group: a `torch.distributed` group; None is the world.
        timeout: seconds to wait for the other ranks at each step; None is the group's own.

    Raises:
        RankError: it failed on a rank.
        GroupError: the ranks cannot reach each other.
        InvalidStateError, NotLoadedError: there is no group; nothing was told to others.
    """
    start = time.perf_counter()
    attempt = _Attempt(Channel(group), what, timeout)
    try:
        with interrupts_deferred():
            try:
                report, figures = attempt.make(prepare)
            except MemsaverError as error:
                if attempt.leaving is not None:
                    raise attempt.leaving from error
                raise
    finally:
        emit_warnings(stacklevel=4)
        if attempt.warning:
            warnings.warn(attempt.warning, MemsaverWarning, stacklevel=3)
    return GroupReport(report, figures, time.perf_counter() - start)


class _Attempt:
    """One call from the view of one rank.

    Attributes:
        leaving: what a callback raised that is no error: an interrupt, the process's exit. Raised
            when the other ranks need this one no more.
        warning: what to warn of at the end, or "".
    """

    def __init__(self, channel: Channel, what: str, timeout: float | None) -> None:
        self.leaving: BaseException | None = None
        self.warning = ""
        self._channel = channel
        self._what = what
        self._timeout_given = timeout
        self._timeout = timeout if _is_timeout(timeout) else None
        self._error: BaseException | None = None
        self._seconds = 0.0  # of this rank's own work

    def make(self, prepare: Callable[[], Call]) -> tuple[Report, tuple[RankFigures, ...]]:
        """Agree on it, begin it, do it. Raises where a rank failed, when all went back."""

        def checked() -> Call:
            if not _is_timeout(self._timeout_given):
                raise ConfigError(
                    f"timeout is a positive number of seconds or None, not {self._timeout_given!r}"
                )
            return prepare()

        call = self._try(checked)
        records = self._meet(_CHECKED)
        if call is None or not self._unanimous(records):
            self._fail(records, _CHECKED, "")
        with ExitStack() as held:
            return self._hold(call, held)

    def _hold(self, call: Call, held: ExitStack) -> tuple[Report, tuple[RankFigures, ...]]:
        def begin() -> Rollback:
            # Until all is over: what is to be undone must not be changed by others.
            held.enter_context(_C.Reservation(call.names))
            rollback = Rollback(call)
            call.begin()
            return rollback

        rollback = self._try(begin)
        try:
            records = self._meet(_BEGUN)
        except GroupError as lost:
            reason = lost
            self._note(lambda: call.abandon(reason))
            raise
        if rollback is None or not self._unanimous(records):
            self._note(lambda: call.abandon(self._reason()))
            self._fail(records, _BEGUN, "")
        return self._run(call, rollback)

    def _run(self, call: Call, rollback: Rollback) -> tuple[Report, tuple[RankFigures, ...]]:
        report = self._try(call.run)
        if report is None:
            self._note(lambda: call.abandon(self._reason()))
        else:
            report = replace(report, seconds=self._seconds)
        try:
            records = self._meet(_DONE, report)
            if report is None or not self._unanimous(records):
                self._undo(rollback)
                self._fail(records, _DONE, rollback.stuck)
        except GroupError as lost:
            if not rollback.done:
                self._undo(rollback)
            lost.message += f"; but {rollback.stuck}" if rollback.stuck else ""
            raise
        return report, tuple(
            RankFigures(rank, record.seconds, record.device_bytes, record.copied_bytes)
            for rank, record in zip(self._channel.ranks, records, strict=True)
        )

    def _undo(self, rollback: Rollback) -> None:
        rollback.undo()
        self.warning = rollback.warning
        for error in rollback.errors:
            self._keep(error)

    # What happens here.

    def _try(self, action: Callable[[], Result]) -> Result | None:
        """The action's result, or None, and its error for the others to hear."""
        start = time.perf_counter()
        try:
            return action()
        except BaseException as error:
            self._error = error
            self._keep(error)
            return None
        finally:
            self._seconds += time.perf_counter() - start

    def _reason(self) -> BaseException:
        return self._error or MemsaverError("it failed on another rank")

    def _note(self, action: Callable[[], object]) -> None:
        """Do what tidies up after an error; its own errors change nothing."""
        try:
            action()
        except BaseException as error:
            self._keep(error)

    def _keep(self, error: BaseException) -> None:
        if not isinstance(error, Exception) and self.leaving is None:
            self.leaving = error

    # What all ranks tell each other.

    def _meet(self, step: str, report: Report | None = None) -> list[Record]:
        record = Record(
            messages.PROTOCOL,
            int(self._error is not None),
            Record.digest_of(self._what, step),
            report.seconds if report else 0.0,
            report.bytes if report else 0,
            report.copied_bytes if report else 0,
        )
        answers = self._all_gather(record.packed())
        return [Record.parse(answer) for answer in answers]

    def _all_gather(self, mine: bytes) -> list[bytes]:
        try:
            return self._channel.all_gather(mine, self._timeout, self._what)
        except GroupError as lost:
            if self._error is not None:
                lost.message += f"; this rank had failed itself: {self._error}"
            lost.message += (
                "; this rank is as it was before the call, and the group may be of no more use: "
                "make a new one, or start the job again"
            )
            raise

    def _unanimous(self, records: list[Record]) -> bool:
        agreed = all(
            (r.protocol, r.digest) == (records[0].protocol, records[0].digest) for r in records
        )
        return agreed and not any(record.failed for record in records)

    def _fail(self, records: list[Record], step: str, stuck: str) -> NoReturn:
        """Hear what failed on whom, and raise it."""
        by_rank = dict(zip(self._channel.ranks, records, strict=True))
        protocols = {rank: record.protocol for rank, record in by_rank.items()}
        if len(set(protocols.values())) > 1:
            raise self._other_versions(protocols)
        # Steps differ only where several threads use the group at once.
        plain = step == _CHECKED or any(record.failed for record in records)
        what = self._what if plain else f"{self._what}, to be {step}"
        answers = self._all_gather(Account.of(self._error, what, stuck).packed())
        told = {
            rank: Account.parse(answer)
            for rank, answer in zip(self._channel.ranks, answers, strict=True)
        }
        barred = {rank: one.not_undone(rank) for rank, one in told.items() if one.stuck}
        guilty = {rank: one.failure(rank) for rank, one in told.items() if by_rank[rank].failed}
        if guilty:
            # One that failed may have made another call: in the words of one that did not.
            asked = [one.what for rank, one in told.items() if rank not in guilty]
            asked += [one.what for one in told.values()]
            raise failed(asked[0], len(records), guilty, barred) from self._error
        raise disagreed({rank: one.call(rank) for rank, one in told.items()}, barred)

    def _other_versions(self, protocols: dict[int, int]) -> RankError:
        from memsaver import __version__

        failures = {
            rank: RankFailure(rank, "", "", "", "", f"speaks protocol {number}")
            for rank, number in protocols.items()
        }
        error = disagreed(failures, {})
        error.message += (
            f"; these are different versions of memsaver (here {__version__}): install one "
            "version on all ranks"
        )
        return error


def _is_timeout(timeout: object) -> bool:
    if timeout is None:
        return True
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    return number and 0 < float(timeout) <= 1e7  # type: ignore[arg-type]
