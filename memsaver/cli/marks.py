"""Marks before a line of output, for terminals that know them and for those that do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["marks_for"]

_MARKS = {"good": "✓", "warned": "!", "bad": "✗"}
_ASCII_MARKS = {"good": "+", "warned": "!", "bad": "x"}


def marks_for(console: Console) -> dict[str, str]:
    """Return the marks of what is good, warned of, and bad, in characters that a console knows."""
    return _ASCII_MARKS if console.options.ascii_only else _MARKS
