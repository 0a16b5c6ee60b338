"""`Overlap`: pauses and resumes the trainer's memory while a colocated session runs stages."""

from __future__ import annotations

import contextlib
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

# Device memory that must stay free, because other processes' needs differ between steps.
_SPARE_BYTES = 1 << 30


class Overlap:
    """Transitions of the trainer's memory that run during other stages of a session.

    Each rank acts independently; the session compares the ranks' outcomes in its stages. One thread
    at a time may use an object. The exit of the interpreter waits for transitions in progress.

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

        A tag may be resumed in the background if only calls with hooks use it, and if the whole
        trainer fits in the free memory: otherwise the resume of all tags must fail as a whole,
        before the training begins.
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
        """Resume all other memory, and begin to resume `returning`, in order. Collective.

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
        """Wait until the memory is resumed. Returns None if `resume` was not called.

        Raises:
            MemsaverError: a resume failed; its tag is paused, with its backup.
        """
        reports = []
        while self._coming:  # after an error, `settle` waits for the others
            reports.append(self._coming[0].wait())
            del self._coming[0]
        if not reports:
            return None
        changes = tuple(change for report in reports for change in report.changes)
        return Report(max(report.seconds for report in reports), changes)

    # --- the pause, while the weights are sent ----------------------------------------------------

    def may_leave(self) -> bool:
        """Return whether memory for an update is free while the states are mapped. Never raises."""
        if not self._wanted or not self._need:
            return False
        try:
            free, _ = device_memory(self._trainer.device)
            states = self._bytes(self._trainer.others, "resident_bytes")
        except MemsaverError:
            return False
        return states > 0 and self._need + _SPARE_BYTES <= free

    def measure(self, update: Callable[[], bool]) -> None:
        """Run an update while the states are paused, and record the memory that it needs.

        Args:
            update: returns whether it has woken the weights; if it has not, nothing is recorded.
        """
        self._need = 0
        if not self._wanted:
            update()
            return
        with LowWater(self._trainer.device) as water:
            at_first = water.free
            has_woken = update()
        if has_woken:
            self._need = at_first - water.free

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
            MemsaverError: the pause failed; the memory is mapped.
        """
        going, self._going = self._going, None
        assert going is not None  # `begin_pause` was called
        return going.wait()

    def undo_pause(self) -> None:
        """Resume the memory that the last pause released, because another rank's pause failed."""
        self.settle()
        left, self._left = self._left, ()
        with contextlib.suppress(MemsaverError):  # it stays paused, with its backup
            if left:
                memsaver.resume(*left)

    # --- after an error ---------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for transitions in progress. Their errors become warnings if nothing raises them."""
        if self._coming or self._going is not None:
            with _C.Reservation(list(self._trainer.tags)):
                self._coming, self._going = [], None

    def _bytes(self, tags: tuple[str, ...], what: str) -> int:
        """Return the sum of one of the tags' statistics on the trainer's device."""
        device = self._trainer.device
        rows: Any = memsaver.stats().tags
        return sum(getattr(r, what) for r in rows if r.tag in tags and r.device == device)
