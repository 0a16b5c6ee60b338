"""What goes wrong between a controller and an engine, beside memsaver's own errors."""

from __future__ import annotations

from memsaver.errors import InvalidStateError, MemsaverError

__all__ = ["EngineBusyError", "EngineError", "EngineTimeoutError"]


class EngineError(MemsaverError):
    """The engine did not do what it was asked to: it died, or answered with an error.

    Attributes:
        http_status: the HTTP status that a server answered with; 0 where none did.
    """

    _status = "ENGINE_FAILED"
    http_status: int = 0


class EngineTimeoutError(EngineError, TimeoutError):
    """The engine did not answer in time. It may still do what it was asked to."""

    _status = "ENGINE_TIMEOUT"


class EngineBusyError(InvalidStateError):
    """The engine has requests in flight, which memory that is given back would kill."""

    _status = "ENGINE_BUSY"
