"""What goes wrong in a rollout, beside the errors of memsaver and of its engine."""

from __future__ import annotations

from memsaver.errors import MemsaverError

__all__ = ["WeightMismatchError"]


class WeightMismatchError(MemsaverError):
    """An engine holds other weights than it was sent. The sender's are as they were.

    Some of the engine's weights are new by then, and others are not: update them again before it
    generates.

    Attributes:
        tensors: the names of the tensors concerned, as they were sent.
    """

    _status = "WEIGHTS_DIFFER"
    tensors: tuple[str, ...] = ()
