"""Run one call on all ranks in three steps (check, begin and run), and roll back if a rank fails.

Each step is an attempt (see `attempts`), so every rank knows the outcomes on all ranks, and all
ranks make the same decision.
"""

from __future__ import annotations

import contextlib
import struct
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from memsaver._runtime.interrupts import signals_deferred
from memsaver._runtime.native import _C, emit_warnings
from memsaver._runtime.timeouts import check_timeout
from memsaver._transitions.handles import Call
from memsaver._transitions.reports import Report
from memsaver.distributed.attempts import Outcomes, Ranks
from memsaver.distributed.errors import GroupError, RankFailure, after_rollback
from memsaver.distributed.invalid_groups import channel_of
from memsaver.distributed.messages import NOTHING, Codec
from memsaver.distributed.reports import GroupReport, RankFigures
from memsaver.distributed.rollback import Rollback
from memsaver.errors import ConfigError, MemsaverError, MemsaverWarning

__all__ = ["run_on_all_ranks"]

_FIGURES = struct.Struct("<dQQ")  # seconds, device bytes and copied bytes
_CODEC = Codec(lambda figures: _FIGURES.pack(*figures), _FIGURES.unpack)
_FAILED_ELSEWHERE = "it failed on another rank"

Result = TypeVar("Result")


def run_on_all_ranks(
    what: Callable[[], str],
    prepare: Callable[[], Call],
    group: Any,
    timeout: float | None,
    done: Callable[[Report], None] = lambda report: None,
) -> GroupReport:
    """Run a call on every rank of the group, or on none.

    Signal handlers run only before or after the call, when this thread has no reservation.

    Args:
        what: a function that returns a description of the call, which must be the same on all
            ranks.
        prepare: a function that checks the arguments and returns this rank's `Call`. The function
            must not change any state.
        group: a `torch.distributed` group; None means the world.
        timeout: seconds to wait for the other ranks at each step; None means the group's own
            timeout.
        done: a function that is called with this rank's report. It is called before the warnings
            are emitted, because a warning raises an exception if Python treats warnings as errors.

    Raises:
        RankError: the call failed on a rank.
        GroupError: the ranks cannot reach each other.
        InvalidStateError, NotLoadedError: torch.distributed is not initialized or not installed, or
            this rank is not in the group. The other ranks are not notified.
    """
    start = time.perf_counter()
    with signals_deferred():
        attempt = _Attempt(what(), group, timeout)

        def warn() -> None:
            emit_warnings(stacklevel=5)
            if attempt.warning:
                warnings.warn(attempt.warning, MemsaverWarning, stacklevel=4)

        try:
            report, figures = attempt.make(prepare)
            done(report)
        except BaseException as error:
            with contextlib.suppress(Warning):  # warnings raised as errors do not replace this one
                warn()
            if attempt.leaving is not None and isinstance(error, MemsaverError):
                raise attempt.leaving from error
            raise
        warn()
    return GroupReport(report, figures, time.perf_counter() - start)


class _Attempt:
    """One rank's part of a call.

    Attributes:
        leaving: a KeyboardInterrupt or SystemExit that a callback raised. The exception is raised
            again when no other rank waits for this rank.
        warning: a warning to emit at the end of the call, or "".
    """

    def __init__(self, what: str, group: Any, timeout: float | None) -> None:
        self.leaving: BaseException | None = None
        self.warning = ""
        self._what = what
        self._refused: MemsaverError | None = None
        try:
            check_timeout(timeout, optional=True)
        except ConfigError as error:
            self._refused, timeout = error, None
        channel, refused = channel_of(group, what, timeout)
        self._ranks = Ranks(channel)
        self._refused = self._refused or refused
        self._timeout = timeout
        self._seconds = 0.0  # the duration of this rank's own work

    def make(self, prepare: Callable[[], Call]) -> tuple[Report, tuple[RankFigures, ...]]:
        """Check, begin and run the call. If a rank failed, raise after the rollback."""
        calls: list[Call] = []

        def check() -> None:
            if self._refused is not None:
                raise self._refused
            calls.append(prepare())

        self._check(self._step("checked", check))
        with ExitStack() as held:
            return self._hold(calls[0], held)

    def _hold(self, call: Call, held: ExitStack) -> tuple[Report, tuple[RankFigures, ...]]:
        rollbacks: list[Rollback] = []

        def begin() -> None:
            # Reserved until the end, because other threads must not change the tags before a
            # rollback.
            held.enter_context(_C.Reservation(call.names))
            rollbacks.append(Rollback(call))
            call.begin()

        try:
            self._check(self._step("begun", begin))
        except MemsaverError as error:
            reason = error if isinstance(error, GroupError) else error.__cause__
            self._abandon(call, reason or MemsaverError(_FAILED_ELSEWHERE))
            raise
        return self._run(call, rollbacks[0])

    def _run(self, call: Call, rollback: Rollback) -> tuple[Report, tuple[RankFigures, ...]]:
        reports: list[Report] = []

        def run() -> tuple[float, int, int]:
            start = time.perf_counter() - self._seconds
            try:
                report = call.run()
            except BaseException as error:
                self._abandon(call, error)
                raise
            reports.append(replace(report, seconds=time.perf_counter() - start))
            return reports[0].seconds, report.bytes, report.copied_bytes

        try:
            outcomes = self._step("done", run, _CODEC)
            if outcomes.is_good:
                values = [(one.rank, *one.value) for one in outcomes.each if one.value]
                return reports[0], tuple(RankFigures(*value) for value in values)
            undone = self._step("undone", lambda: self._undo(rollback))
        except GroupError as lost:
            if not rollback.done:
                self._note(lambda: self._undo(rollback))
            lost.message += f"; but {rollback.stuck}" if rollback.stuck else ""
            raise
        stuck = {
            rank: replace(failure, kind="", status="", tag="")
            for rank, failure in undone.failures.items()
        }
        self._fail(outcomes, stuck)

    def _undo(self, rollback: Rollback) -> None:
        rollback.undo()
        self.warning = rollback.warning
        for error in rollback.errors:
            self._keep(error)
        if rollback.stuck:
            raise MemsaverError(rollback.stuck)

    # --- steps

    def _step(
        self, step: str, work: Callable[[], Result], codec: Codec = NOTHING
    ) -> Outcomes[Result]:
        def timed() -> Result:
            start = time.perf_counter()
            try:
                return work()
            finally:
                self._seconds += time.perf_counter() - start

        try:
            outcomes = self._ranks.attempt(
                self._what,
                timed,
                timeout=self._timeout,
                codec=codec,
                step=step,
                uninterrupted=True,
            )
        except GroupError as lost:
            lost.message += (
                "; this rank's tags are unchanged, and the group may be unusable: create a new "
                "group, or restart the job"
            )
            raise
        self._keep(outcomes.own)
        return outcomes

    def _check(self, outcomes: Outcomes[Any]) -> None:
        if not outcomes.is_good:
            self._fail(outcomes, {})

    def _fail(self, outcomes: Outcomes[Any], stuck: dict[int, RankFailure]) -> NoReturn:
        error = outcomes.error(after_rollback(stuck))
        error.stuck = stuck
        raise error from outcomes.own

    # --- errors outside the steps

    def _abandon(self, call: Call, reason: BaseException) -> None:
        self._note(lambda: call.abandon(reason))

    def _note(self, action: Callable[[], object]) -> None:
        """Run a cleanup action after an error, and ignore all exceptions except interrupts."""
        try:
            action()
        except BaseException as error:
            self._keep(error)

    def _keep(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, Exception) and self.leaving is None:
            self.leaving = error
