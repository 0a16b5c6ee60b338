"""The marks at the start of output lines, with ASCII replacements for limited encodings."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["marks_for"]

_MARKS = {"good": "✓", "absent": "-", "warned": "!", "bad": "✗"}
_ASCII_MARKS = {"good": "+", "absent": "-", "warned": "!", "bad": "x"}


def marks_for(console: Console) -> dict[str, str]:
    """Return the mark of each level of findings, in characters of the console's encoding."""
    return _ASCII_MARKS if console.options.ascii_only else _MARKS
