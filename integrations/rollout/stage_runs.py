"""`StageRuns`: runs and reports the stages of a colocated session on all ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from memsaver._inspection.statistics import stats
from memsaver._runtime.interrupts import interruptible
from memsaver.distributed.errors import GroupError
from memsaver.errors import MemsaverError

from .fence import Fence
from .low_water import LowWater
from .stages import RankStage, Stage, StageReport
from .together import GRACE_SECONDS, Together
from .trainer_memory import TrainerMemory

__all__ = ["StageRuns"]

Result = TypeVar("Result")
Mine = TypeVar("Mine", RankStage, None)


class StageRuns:
    """This is a base class of `ColocatedSession`, which sets the attributes.

    Attributes:
        stages: the reports of the latest rollout and of later stages.
    """

    stages: list[StageReport]
    _together: Together
    _fence: Fence
    _trainer: TrainerMemory
    _timeout: float
    _block_timeout: float
    _on_stage: Callable[[StageReport], object] | None
    _rank: int
    _all_know_failure: bool = False  # whether the latest exchange reported a failure to all ranks

    def _stage(
        self,
        stage: Stage,
        action: Callable[[], Result],
        afterwards: Callable[[], object] | None = None,
    ) -> Result:
        """Run a stage on every rank, and return the result of `action` on this rank.

        Args:
            stage: the stage.
            action: the function that runs this rank's part of the stage.
            afterwards: a function that is called after the stage on all ranks; the function must
                not fail.
        """
        started = time.monotonic()
        results: list[Result] = []
        error = None
        with LowWater(self._trainer.device) as water:
            try:
                results.append(action())
            except BaseException as raised:
                error = raised
            seconds = time.monotonic() - started
        limit = self._timeout + GRACE_SECONDS
        result = results[0] if results else None
        self._conclude(stage, started, seconds, water, result, error, limit)
        if afterwards is not None:
            afterwards()
        return results[0]

    @contextlib.contextmanager
    def _block(self, stage: Stage) -> Iterator[list[object]]:
        """Run the caller's block as a stage; yield a list for the stage's result."""
        started = time.monotonic()
        error = None
        results: list[object] = []
        with LowWater(self._trainer.device) as water:
            try:
                yield results
            except BaseException as raised:
                error = raised
            seconds = time.monotonic() - started
        try:
            result = results[0] if results else None
            self._conclude(stage, started, seconds, water, result, error, self._block_timeout)
        except Exception:  # this rank's own exception takes precedence
            if error is None:
                raise
        if error is not None:
            raise error  # the caller's own exception

    def _conclude(
        self,
        stage: Stage,
        started: float,
        seconds: float,
        water: LowWater,
        result: object,
        error: BaseException | None,
        timeout: float,
    ) -> None:
        """Exchange results with all ranks and report the stage; raise an error if a rank failed."""
        mine = RankStage(self._rank, seconds, water.peak, water.total, _tag_bytes())
        ranks: tuple[RankStage, ...] = ()
        failed = ""
        try:
            ranks = self._exchange(f"stage {stage.value}", mine, error, timeout)
        except BaseException as raised:
            failed = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            took = time.monotonic() - started
            report = StageReport(stage, started, took, ranks, result, failed)
            self.stages.append(report)
            if self._on_stage is not None:
                self._on_stage(report)

    def _all_agree(self, what: str, may: Callable[[], bool]) -> bool:
        """Return whether `may` returns True on all ranks; `may` must not raise."""
        return all(self._together.gather(what, may, self._timeout))

    def _common(self, what: str, mine: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
        """Return the names that `mine` returns on every rank; `mine` must not raise."""
        first, *others = self._together.gather(what, mine, self._timeout)
        return tuple(name for name in first if all(name in each for each in others))

    def _exchange(
        self, what: str, mine: Mine, error: BaseException | None, timeout: float
    ) -> tuple[Mine, ...]:
        """Return the values of all ranks; raise an error if a rank reports an error.

        If the handler of a signal that arrived before this call raises an exception, the exception
        replaces `error`, unless `error` is an interrupt or an exit. After an exception, the ranks
        can make another collective call if `_all_know_failure` is true. Otherwise, the other ranks
        might not have raised an exception, or the group is unusable.
        """
        self._all_know_failure = False
        try:
            interruptible(lambda: None)
        except BaseException as raised:
            if error is None or isinstance(error, Exception):
                error = raised
        try:
            everyones = self._together.gather(
                what, lambda: (mine, error is not None), timeout, uninterrupted=True
            )
            if any(failed for _, failed in everyones):
                self._all_know_failure = True
                self._fence.wait(what, error)
        except Exception as shared:
            if isinstance(shared, GroupError):
                self._all_know_failure = False
            if error is None or isinstance(error, Exception):
                raise
            raise error from None  # an interrupt or an exit is raised only on its own rank
        return tuple(theirs for theirs, _ in everyones)


def _tag_bytes() -> int:
    try:
        return stats().resident_bytes
    except MemsaverError:
        return 0
