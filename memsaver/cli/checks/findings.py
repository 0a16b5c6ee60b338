"""What a check says: one finding for each thing it looked at."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Finding", "Level", "bad", "good", "warned"]


class Level(str, enum.Enum):
    """How a thing is. Compares equal to its name."""

    GOOD = "good"
    WARNED = "warned"
    BAD = "bad"

    __str__ = str.__str__


@dataclass(frozen=True)
class Finding:
    """One thing that a check looked at.

    Attributes:
        name: what it is, the same in every version and on every machine: "torch version".
        level: good; warned: memsaver works, but not as well or as expected; bad: it does not work,
            or contents may be lost.
        text: what is so.
        advice: what to do about it, or "". Not empty where the level is warned or bad.
        data: the values behind the text, as JSON has them; sizes are in bytes.
    """

    name: str
    level: Level
    text: str
    advice: str = ""
    data: dict[str, Any] = field(default_factory=dict)


def good(name: str, text: str, advice: str = "", /, **data: Any) -> Finding:
    """Nothing has to be done; the advice is for those who want more."""
    return Finding(name, Level.GOOD, text, advice, data)


def warned(name: str, text: str, advice: str, /, **data: Any) -> Finding:
    """It works, but not as well or as expected."""
    return Finding(name, Level.WARNED, text, advice, data)


def bad(name: str, text: str, advice: str, /, **data: Any) -> Finding:
    """It does not work, or contents may be lost."""
    return Finding(name, Level.BAD, text, advice, data)
