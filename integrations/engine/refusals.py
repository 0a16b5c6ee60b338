"""The messages with which an engine refuses requests that need released memory.

An engine's processes exchange errors as text in the engine's own messages, so the text contains the
released tags, and `asleep_in` parses it.

Inside a server, a `Refusal` passes a refused request's error to the middleware that writes the
response (`http.asleep_answers`).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextvars import ContextVar

from .errors import EngineAsleepError
from .tags import RELEASE_ORDER

__all__ = ["Refusal", "asleep_error", "asleep_in", "asleep_text", "refusal_here", "refused"]

_TAG = "|".join(RELEASE_ORDER)
_TEXT = re.compile(rf"the engine is asleep \(released: ((?:{_TAG})(?:, (?:{_TAG}))*)\)[^\n]*")


def asleep_text(released: Collection[str], what: str, more: str = "") -> str:
    """Return the text of a refusal.

    Args:
        released: the engine's released tags, at least one.
        what: the refused operation, such as "generate".
        more: an additional clause, or "".
    """
    tags = ", ".join(tag for tag in RELEASE_ORDER if tag in released)
    text = f"the engine is asleep (released: {tags}) and cannot {what}: wake it up first"
    return f"{text}; {more}" if more else text


def asleep_in(text: object) -> EngineAsleepError | None:
    """Return the refusal in a text, such as an engine's error message; None if there is none."""
    found = _TEXT.search(text) if isinstance(text, str) else None
    if found is None:
        return None
    tags = tuple(found[1].split(", "))
    error = EngineAsleepError(found[0], tag=tags[0])
    error.tags = tags
    return error


def asleep_error(released: Collection[str], what: str, more: str = "") -> EngineAsleepError:
    """Return the error for a refused operation; see `asleep_text`."""
    error = asleep_in(asleep_text(released, what, more))
    assert error is not None
    return error


class Refusal:
    """Passes a refused request's error to the server's middleware.

    Attributes:
        error: the error; None if the request was not refused.
    """

    def __init__(self) -> None:
        self.error: EngineAsleepError | None = None


# Set by the middleware: an engine's endpoints answer in several formats, without the tags.
refusal_here: ContextVar[Refusal | None] = ContextVar("memsaver_refusal", default=None)


def refused(error: EngineAsleepError) -> EngineAsleepError:
    """Return the error that a refused request raises, and record it for the middleware.

    An engine's endpoints handle the error like their own errors. Requires FastAPI, which engines
    also require.
    """
    from .asleep_error import AsleepError

    made = AsleepError.of(error)
    here = refusal_here.get()
    if here is not None:
        here.error = made
    return made
