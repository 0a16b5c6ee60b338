"""Errors specific to rollouts, in addition to those of memsaver and of engines."""

from __future__ import annotations

from memsaver.errors import MemsaverError

from ..engine.errors import EngineError

__all__ = ["RestartLimitError", "WeightMismatchError"]


class WeightMismatchError(MemsaverError):
    """An engine's weights differ from those sent. The sender's weights are unchanged.

    Only some of the engine's weights are new: update them again before the engine generates.

    Attributes:
        tensors: the sender's names of the tensors concerned.
    """

    _status = "WEIGHTS_DIFFER"
    tensors: tuple[str, ...] = ()


class RestartLimitError(EngineError):
    """An engine died, and no restart is left: see `Restarts`. The trainer's memory is unchanged."""

    _status = "ENGINE_RESTARTS_USED_UP"
