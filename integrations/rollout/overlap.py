"""`Overlap`: pauses and resumes the trainer's memory while a colocated session runs its stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import memsaver
from memsaver._inspection.statistics import device_memory
from memsaver._runtime.native import _C
from memsaver._transitions.handles import Transition
from memsaver._transitions.reports import Report
from memsaver.errors import MemsaverError

from .low_water import LowWater
from .trainer_memory import TrainerMemory

__all__ = ["Overlap"]

# Device memory that must stay free, because other processes' needs vary from step to step.
_SPARE_BYTES = 1 << 30


class Overlap:
    """Background transitions of the trainer's memory during other stages of a session.

    Each rank runs its transitions independently; the session's stages compare the outcomes of all
    ranks. Only one thread at a time may use an object. Interpreter exit waits for transitions in
    progress.

    Args:
        trainer: the trainer's memory.
        wanted: whether transitions may overlap with stages at all.
    """

    def __init__(self, trainer: TrainerMemory, wanted: bool) -> None:
        self._trainer = trainer
        self._wanted = wanted
        self._coming: list[Transition] = []
        self._going: Transition | None = None
        self._left: tuple[str, ...] = ()  # the tags that the last pause found mapped
        self._need = 0  # device memory that an update needs; 0 if unknown

    # --- the resume, while the trainer computes its gradients -------------------------------------

    def returning(self) -> tuple[str, ...]:
        """Return the tags that may be resumed in the background on this rank. Raises nothing.

        A tag may be resumed in the background if its memory is used only by calls that wait for the
        resume, and if all of the trainer's memory fits in the free memory. Otherwise, all tags must
        be resumed before training begins, because a failure must apply to all of them.
        """
        tags = self._trainer.awaited if self._wanted else ()
        if not tags:
            return ()
        try:
            free, _ = device_memory(self._trainer.device)
            needed = self._bytes(self._trainer.tags, "paused_now_bytes")
        except MemsaverError:
            return ()
        return tags if needed + _SPARE_BYTES <= free else ()

    def resume(self, returning: Sequence[str]) -> Report | None:
        """Resume the tags that are not in `returning`, and begin resuming the others, in order.

        This is a collective call.

        Args:
            returning: the tags that all ranks may resume in the background.
        """
        report: Report | None = self._trainer.resume(
            *(t for t in self._trainer.tags if t not in returning)
        )
        for tag in returning:
            self._coming.append(self._trainer.begin_resume(tag))
        return report

    def finish_resume(self) -> Report | None:
        """Wait until the tags are resumed, and return the report; None if no resume was begun.

        Raises:
            MemsaverError: a resume failed; the tag is still paused, and its backup is intact.
        """
        reports = []
        while self._coming:  # after an error, `settle` waits for the others
            reports.append(self._coming[0].wait())
            del self._coming[0]
        if not reports:
            return None
        changes = tuple(change for report in reports for change in report.changes)
        return Report(max(report.seconds for report in reports), changes)

    def missing(self, returning: Sequence[str]) -> tuple[str, ...]:
        """Wait for transitions in progress; return the tags in `returning` that are not mapped."""
        self.settle()
        return tuple(tag for tag in returning if memsaver.state(tag) != "mapped")

    # --- the pause, while the weights are sent ----------------------------------------------------

    def may_leave(self) -> bool:
        """Return whether an update is known to fit while the optimizer's states are mapped.

        Never raises.
        """
        if not self._wanted or not self._need:
            return False
        try:
            free, _ = device_memory(self._trainer.device)
            states = self._bytes(self._trainer.others, "resident_bytes")
        except MemsaverError:
            return False
        return states > 0 and self._need + _SPARE_BYTES <= free

    def measure(self, update: Callable[[], bool]) -> None:
        """Run an update while the optimizer's states are paused, and record the memory it needs.

        Args:
            update: a function that runs the update, and returns whether the weights were woken; if
                False, nothing is recorded.
        """
        self.forget()
        if not self._wanted:
            update()
            return
        with LowWater(self._trainer.device) as water:
            at_first = water.free
            has_woken = update()
        if has_woken:
            self._need = at_first - water.free

    def forget(self) -> None:
        """Forget the measured memory need, so that the next update runs after the pause."""
        self._need = 0

    def begin_pause(self) -> Report:
        """Resume the model, and begin pausing the rest of the trainer's memory. Collective."""
        self._left = ()  # until the pause begins, there is nothing to undo
        report: Report = self._trainer.resume(self._trainer.model)
        tags = self._trainer.others
        self._left = tuple(tag for tag in tags if memsaver.state(tag) == "mapped")
        self._going = memsaver.pause(*tags, wait=False)
        return report

    def finish_pause(self) -> Report:
        """Wait until the pause has released the memory.

        Raises:
            MemsaverError: the pause failed; the memory is still mapped.
        """
        going, self._going = self._going, None
        assert going is not None  # `begin_pause` was called
        return going.wait()

    def undo_pause(self) -> None:
        """Resume the memory that the last pause released, because another rank's pause failed.

        Raises:
            MemsaverError: the resume failed; the memory stays paused, and its backup is intact.
        """
        self.settle()
        left, self._left = self._left, ()
        if left:
            memsaver.resume(*left)

    # --- after an error ---------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for transitions in progress. Warn about errors that no other call raises."""
        if self._coming or self._going is not None:
            with _C.Reservation(list(self._trainer.tags)):
                self._coming, self._going = [], None

    def _bytes(self, tags: tuple[str, ...], what: str) -> int:
        """Return the sum of one statistic over the given tags on the trainer's device."""
        device = self._trainer.device
        rows: Any = memsaver.stats().tags
        return sum(getattr(r, what) for r in rows if r.tag in tags and r.device == device)
