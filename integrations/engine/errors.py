"""Errors of an engine, in addition to memsaver's own."""

from __future__ import annotations

from memsaver.errors import InvalidStateError, MemsaverError

__all__ = [
    "EngineAsleepError",
    "EngineBusyError",
    "EngineDiedError",
    "EngineError",
    "EngineTimeoutError",
]


class EngineError(MemsaverError):
    """The engine died or reported an error, and did not complete a request.

    Attributes:
        http_status: the HTTP status of a server's answer; 0 if there was no answer.
    """

    _status = "ENGINE_FAILED"
    http_status: int = 0


class EngineDiedError(EngineError):
    """One of the engine's processes exited, so the engine no longer answers requests."""

    _status = "ENGINE_DIED"


class EngineTimeoutError(EngineError, TimeoutError):
    """The engine did not answer in time. The engine may still complete the request."""

    _status = "ENGINE_TIMEOUT"


class EngineBusyError(InvalidStateError):
    """The engine cannot perform the operation while requests are in flight."""

    _status = "ENGINE_BUSY"


class EngineAsleepError(InvalidStateError):
    """A request needs memory that the engine has released.

    Attributes:
        tags: the engine's released tags.
    """

    _status = "ENGINE_ASLEEP"
    tags: tuple[str, ...] = ()
