"""Messages of an engine that refuses requests for released memory.

An engine's processes exchange errors as text in the engine's own messages. The text therefore
contains the released tags, and `asleep_in` parses it.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from .errors import EngineAsleepError
from .tags import RELEASE_ORDER

__all__ = ["asleep_in", "asleep_text"]

_TAG = "|".join(RELEASE_ORDER)
_TEXT = re.compile(rf"the engine is asleep \(released: ((?:{_TAG})(?:, (?:{_TAG}))*)\)[^\n]*")


def asleep_text(released: Collection[str], what: str, more: str = "") -> str:
    """Return the text of a refusal.

    Args:
        released: the engine's released tags; at least one.
        what: the refused operation, such as "generate".
        more: a further clause, or "".
    """
    tags = ", ".join(tag for tag in RELEASE_ORDER if tag in released)
    text = f"the engine is asleep (released: {tags}) and cannot {what}: wake it up first"
    return f"{text}; {more}" if more else text


def asleep_in(text: object) -> EngineAsleepError | None:
    """Return the refusal in a text, such as an engine's error message; None if it contains none."""
    found = _TEXT.search(text) if isinstance(text, str) else None
    if found is None:
        return None
    tags = tuple(found[1].split(", "))
    error = EngineAsleepError(found[0], tag=tags[0])
    error.tags = tags
    return error
