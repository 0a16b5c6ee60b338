"""The texts with which an engine refuses requests that need released memory.

An engine's processes exchange errors as texts in the engine's own messages, so the text itself
names the released tags, and `asleep_in` reads them again.
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
        what: the operation that is refused, such as "generate".
        more: a further sentence, or "".
    """
    tags = ", ".join(tag for tag in RELEASE_ORDER if tag in released)
    text = f"the engine is asleep (released: {tags}) and cannot {what}: wake it up first"
    return f"{text}; {more}" if more else text


def asleep_in(text: object) -> EngineAsleepError | None:
    """Return the refusal in a text, such as the message of an engine's answer; None without one."""
    found = _TEXT.search(text) if isinstance(text, str) else None
    if found is None:
        return None
    tags = tuple(found[1].split(", "))
    error = EngineAsleepError(found[0], tag=tags[0])
    error.tags = tags
    return error
