"""`AsleepError`: the error of a refused request, which an engine's server reports as status 503."""

from __future__ import annotations

from http import HTTPStatus

import fastapi

from .errors import EngineAsleepError

__all__ = ["AsleepError"]


class AsleepError(EngineAsleepError, fastapi.HTTPException):  # type: ignore[misc]
    """An `EngineAsleepError` that the server's endpoints handle like their own errors.

    Attributes:
        status_code: the HTTP status 503.
        detail: the error's message.
        headers: always None.
    """

    status_code = int(HTTPStatus.SERVICE_UNAVAILABLE)
    headers = None

    def __init__(self, message: str) -> None:
        EngineAsleepError.__init__(self, message)

    @property
    def detail(self) -> str:
        """The message."""
        return self.message

    @classmethod
    def of(cls, error: EngineAsleepError) -> AsleepError:
        """Return the error as an `AsleepError`, with the same tags and cause."""
        made = cls(error.message)
        made.tag, made.tags, made.__cause__ = error.tag, error.tags, error.__cause__
        return made
