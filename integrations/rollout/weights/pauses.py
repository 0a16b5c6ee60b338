"""Pauses generation while an engine's weights are updated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from memsaver.errors import MemsaverError

from ..together import GRACE_SECONDS
from .options import Options
from .update_steps import UpdateSteps

if TYPE_CHECKING:
    from ..engine_set import EngineSet
    from ..rollout_engine import RolloutEngine

__all__ = ["paused_generation"]

_CALL = "call continue_generation()"


@contextlib.contextmanager
def paused_generation(
    engine: RolloutEngine | EngineSet, steps: UpdateSteps, options: Options
) -> Iterator[None]:
    """Pause generation on all engines during the block, if requested. A collective.

    If the pause fails on an engine, generation continues on all engines before the error is raised,
    even if generation was already paused earlier. The error's message names the engines on which
    generation could not continue. If some ranks cannot be reached, generation can stay paused, and
    the message says so. After an error in the block, generation stays paused.
    """
    mode, timeout = options.pause, options.timeout
    if mode is None:
        yield
        return
    backend = engine.backend

    def begin() -> None:
        assert backend is not None and mode is not None
        backend.pause_generation(mode, timeout)

    def end() -> None:
        assert backend is not None
        backend.continue_generation(timeout)

    try:
        steps.on_leader("pausing generation", begin, timeout)
    except BaseException as error:
        state = _continued(engine, steps, min(timeout, GRACE_SECONDS))
        if isinstance(error, MemsaverError):
            error.message += f"; nothing was sent; {state}"
        raise
    try:
        yield
    except MemsaverError as error:
        error.message += f"; generation is still paused: repeat the update, or {_CALL}"
        raise
    try:
        steps.on_leader("continuing generation", end, timeout)
    except MemsaverError as error:
        error.message += (
            "; the weights were updated, but generation may still be paused on engines that could "
            f"not continue: {_CALL}"
        )
        raise


def _continued(engine: RolloutEngine | EngineSet, steps: UpdateSteps, limit: float) -> str:
    """Continue generation on all engines after a failed pause, and describe their states.

    The failed pause might still have stopped generation. A collective.
    """
    backend = engine.backend

    def end() -> str:
        assert backend is not None
        try:
            backend.continue_generation(limit)
        except Exception as error:
            return str(error)
        return ""

    what = "continuing generation after a failed pause"
    try:
        with steps.step(what, limit) as own:
            failure = own.on_leader(what, end, limit)
        each = steps.along(what, (engine.layout.dp_rank, failure), limit)
    except MemsaverError as error:
        return f"generation may still be paused ({error}): {_CALL}"
    failed = [
        f"engine {number}: {failure}" if len(each) > 1 else failure
        for number, failure in each
        if failure
    ]
    if not failed:
        return "generation continues on all engines"
    return (
        "generation may still be paused on engines that could not continue "
        f"({'; '.join(failed)}): {_CALL}"
    )
