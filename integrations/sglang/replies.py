"""SGLang's replies to requests that it can reject."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.errors import EngineError

__all__ = ["Reply", "UnknownRequestError"]


class UnknownRequestError(EngineError):
    """This version of SGLang does not support the request."""


@dataclass(frozen=True)
class Reply:
    """SGLang's reply to a request, from an engine in this process or from a server.

    Attributes:
        success: whether SGLang reports success.
        message: the reply's text, or "".
        ranks: one row for each of the engine's ranks, in the reply to a checksum request.
    """

    success: bool = True
    message: str = ""
    ranks: Sequence[Any] = ()

    def check(self, request: str) -> None:
        """Raise `EngineError` if the request failed; `request` describes it in the message."""
        if not self.success:
            raise EngineError(f"the engine refused {request}: {self.message}")
