"""`StageOrder`: runs the stages of a colocated session in order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..engine.held import release_cache
from ..trainer.arrivals import limited_waits
from .failures import clear_frames, is_shortage, noting
from .overlap import Overlap
from .rollout_engine import RolloutEngine
from .session_arguments import options_of
from .stage_runs import StageRuns
from .stages import Stage
from .together import GRACE_SECONDS

__all__ = ["StageOrder"]

_WEIGHTS = "weights"  # the engine's tag for its weights


class StageOrder(StageRuns):
    """This is the base class of `ColocatedSession`, which sets the attributes.

    Attributes:
        engine: the engine.
    """

    engine: RolloutEngine
    _overlap: Overlap
    _state: Callable[[], Any]  # returns the weights to send
    _options: Mapping[str, Any] | Callable[[], Mapping[str, Any]]  # of an update
    _is_current: bool  # whether the engine has the trainer's weights
    _sleeps: bool  # whether the engine sleeps and the trainer pauses
    _keeps: bool  # whether the engine's weights survive its sleep
    _rewrites: bool  # whether each update rewrites all weights

    def _enter_rollout(self) -> None:
        trainer, overlap = self._trainer, self._overlap
        self._stage(Stage.SETTLE, trainer.synchronize, release_cache)
        overlaps = not self._is_current and self._all_agree(
            "the pause's overlap", overlap.may_leave
        )
        if self._sleeps and not overlaps:
            self._stage(Stage.PAUSE_OPTIMIZER, lambda: trainer.pause(*trainer.others))
        if not self._is_current:
            if overlaps:
                self._update_beside_pause()
            else:
                if self._sleeps:
                    self._stage(Stage.RESUME_MODEL, lambda: trainer.resume(trainer.model))
                overlap.measure(self._update_engine)
        if self._sleeps:
            self._stage(Stage.PAUSE_MODEL, lambda: trainer.pause(trainer.model))
            self._stage(Stage.WAKE_REST, lambda: self._wake(None))

    def _update_beside_pause(self) -> None:
        """Send the weights during the optimizer's pause, or after the pause if memory is short."""
        self._stage_of_pause(Stage.RESUME_MODEL, self._overlap.begin_pause)
        is_short = False
        try:
            self._update_engine()
        except BaseException as error:
            self._overlap.forget()
            if not self._all_know_failure:
                raise  # the other ranks might not end the pause, so this rank must not wait
            is_short = is_shortage(error)
            if not is_short:
                with noting(error, "the pause of the optimizer's memory"):
                    self._end_pause()
                raise
            clear_frames(error)
        self._end_pause()
        if is_short:
            self._overlap.measure(self._update_engine)

    def _end_pause(self) -> None:
        self._stage_of_pause(Stage.PAUSE_OPTIMIZER, self._overlap.finish_pause)

    def _stage_of_pause(self, stage: Stage, action: Callable[[], Any]) -> None:
        """Run a stage; if it fails, map the optimizer's memory again on all ranks."""
        try:
            self._stage(stage, action)
        except BaseException as error:
            with noting(error, "the resume of the optimizer's memory on this rank"):
                self._overlap.undo_pause()
            raise

    @contextlib.contextmanager
    def _undoing_resume(self, returning: Sequence[str]) -> Iterator[None]:
        """Run a block during which each rank resumes the tags in `returning` in the background.

        After an error that all ranks know of, a tag whose resume failed on any rank is paused again
        on all ranks, with its current contents. After any other error, no rank waits for the
        others.
        """
        try:
            yield
        except BaseException as error:
            if returning and self._all_know_failure:
                with noting(error, "the pause of the tags that are not mapped on all ranks"):
                    missing = self._together.gather(
                        "the tags that are not mapped",
                        lambda: self._overlap.missing(returning),
                        self._timeout + GRACE_SECONDS,
                        uninterrupted=True,  # an interrupt would prevent the pause
                    )
                    failed = {tag for tags in missing for tag in tags}
                    self._trainer.pause(*(tag for tag in returning if tag in failed))
            raise

    def _update_engine(self) -> bool:
        """Send the trainer's weights to the engine; return whether any weights were woken."""
        woken = None
        if self._sleeps:
            options = _options(keep_weights=not self._rewrites)
            woken = self._stage(Stage.WAKE_WEIGHTS, lambda: self._wake(_WEIGHTS, **options))
        self._stage(Stage.UPDATE, self._update, release_cache)
        self._is_current = True
        return bool(getattr(woken, "changed", ()))

    def _sleep(self, keep_weights: bool) -> None:
        if self._sleeps:
            self._is_current = self._is_current and self._keeps and keep_weights
            options = _options(keep_weights) | {"wait_idle": True, "timeout": self._timeout}
            self._stage(Stage.SLEEP, lambda: self.engine.sleep(**options))

    def _wake(self, tag: str | None, **options: Any) -> Any:
        return self.engine.wake_up(tag, timeout=self._timeout, **options)

    def _update(self) -> Any:
        given: list[tuple[Any, dict[str, Any]]] = []

        def prepare() -> None:
            with limited_waits(self._timeout):
                given.append((self._state(), options_of(self._options)))

        # A failure of `prepare` is raised on all ranks here; otherwise the others would wait for
        # this rank in the engine's own call.
        limit = self._timeout + GRACE_SECONDS
        self._together.gather("the weights to send", prepare, limit)
        ((state, options),) = given
        return self.engine.update_weights(state, **options)


def _options(keep_weights: bool) -> dict[str, Any]:
    """Return `keep_weights` as an argument only if False, because older engine classes lack it."""
    return {} if keep_weights else {"keep_weights": False}
