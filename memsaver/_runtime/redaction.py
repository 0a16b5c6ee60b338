"""Remove this process's secrets from error messages."""

from __future__ import annotations

import weakref
from typing import Protocol

__all__ = ["Hides", "redacted", "register"]


class Hides(Protocol):
    """A secret that can be removed from a text."""

    def hidden_in(self, text: str) -> str:
        """Return the text without the secret."""


# Changed and read by single operations, each of which is atomic under the GIL.
_secrets: list[weakref.ref[Hides]] = []


def register(secret: Hides) -> None:
    """Remove the secret from all error messages while the object `secret` exists."""
    _secrets.append(weakref.ref(secret, _secrets.remove))


def redacted(text: str) -> str:
    """Return the text without the registered secrets."""
    for reference in tuple(_secrets):
        secret = reference()
        if secret is not None:
            text = secret.hidden_in(text)
    return text
