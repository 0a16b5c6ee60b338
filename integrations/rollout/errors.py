"""Errors that only rollouts raise, in addition to the errors of memsaver and of engines."""

from __future__ import annotations

from memsaver.errors import MemsaverError

from ..engine.errors import EngineError

__all__ = ["RestartLimitError", "WeightMismatchError"]


class WeightMismatchError(MemsaverError):
    """An engine's weights differ from the weights that were sent.

    The sender's weights are unchanged.

    Only some of the engine's weights are new. Update all weights again before the engine generates.

    Attributes:
        tensors: the sender's names for the tensors that differ.
    """

    _status = "WEIGHTS_DIFFER"
    tensors: tuple[str, ...] = ()


class RestartLimitError(EngineError):
    """An engine died, and the limit on restarts is reached: see `Restarts`.

    The trainer's memory is unchanged.
    """

    _status = "ENGINE_RESTARTS_USED_UP"
