"""Findings, which are the results of checks."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Finding", "Level", "absent", "bad", "good", "warned"]


class Level(str, enum.Enum):
    """The severity of a finding. A level compares equal to its name."""

    GOOD = "good"
    ABSENT = "absent"
    WARNED = "warned"
    BAD = "bad"

    __str__ = str.__str__


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: the name of the check, such as "torch version", which is the same in every version
            and on every machine.
        level: "good" if no action is needed; "absent" if an optional part is not installed, not set
            or not supported; "warned" if memsaver works, but not optimally or not as expected;
            "bad" if memsaver does not work, or contents may be lost.
        text: the facts.
        advice: the recommended action, or "". Advice is required if the level is "warned" or "bad".
        data: the values in the text, for JSON output. Sizes are in bytes.
    """

    name: str
    level: Level
    text: str
    advice: str = ""
    data: dict[str, Any] = field(default_factory=dict)


def good(name: str, text: str, advice: str = "", /, **data: Any) -> Finding:
    """Return a finding that needs no action. The advice is optional."""
    return Finding(name, Level.GOOD, text, advice, data)


def absent(name: str, text: str, advice: str = "", /, **data: Any) -> Finding:
    """Return a finding for a missing optional part. The advice states the purpose of the part."""
    return Finding(name, Level.ABSENT, text, advice, data)


def warned(name: str, text: str, advice: str, /, **data: Any) -> Finding:
    """Return a finding that memsaver works, but not optimally or not as expected."""
    return Finding(name, Level.WARNED, text, advice, data)


def bad(name: str, text: str, advice: str, /, **data: Any) -> Finding:
    """Return a finding that memsaver does not work, or that contents may be lost."""
    return Finding(name, Level.BAD, text, advice, data)
