"""Findings: the results of the checks."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Finding", "Level", "absent", "bad", "good", "warned"]


class Level(str, enum.Enum):
    """The severity of a finding. Compares equal to its name."""

    GOOD = "good"
    ABSENT = "absent"
    WARNED = "warned"
    BAD = "bad"

    __str__ = str.__str__


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: identifies the check in every version and on every machine: "torch version".
        level: "good": no action is needed; "absent": something optional is not installed, not set
            or not supported; "warned": memsaver works, but not optimally or not as expected;
            "bad": memsaver does not work, or contents may be lost.
        text: the facts.
        advice: the recommended action, or "". Required if the level is "warned" or "bad".
        data: the values behind the text, for JSON; sizes are in bytes.
    """

    name: str
    level: Level
    text: str
    advice: str = ""
    data: dict[str, Any] = field(default_factory=dict)


def good(name: str, text: str, advice: str = "", /, **data: Any) -> Finding:
    """Return a finding that needs no action; the advice is optional."""
    return Finding(name, Level.GOOD, text, advice, data)


def absent(name: str, text: str, advice: str = "", /, **data: Any) -> Finding:
    """Return a finding that something optional is missing; the advice states its purpose."""
    return Finding(name, Level.ABSENT, text, advice, data)


def warned(name: str, text: str, advice: str, /, **data: Any) -> Finding:
    """Return a finding that memsaver works, but not optimally or not as expected."""
    return Finding(name, Level.WARNED, text, advice, data)


def bad(name: str, text: str, advice: str, /, **data: Any) -> Finding:
    """Return a finding that memsaver does not work, or that contents may be lost."""
    return Finding(name, Level.BAD, text, advice, data)
