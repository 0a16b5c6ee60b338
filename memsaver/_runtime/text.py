"""Format sizes and names for messages."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

__all__ = ["did_you_mean", "plain_text", "size_text"]


_LONGEST = 128  # characters of a name to compare: the search takes quadratic time


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'weights'?" for a known name similar to `name`, or ""."""
    short = [one for one in known if len(one) <= _LONGEST]
    near = difflib.get_close_matches(name[:_LONGEST], short, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def plain_text(text: str) -> str:
    """Return the text on one line, without terminal control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def size_text(nbytes: int, *, down: bool = False) -> str:
    """Format a size in the largest possible unit, with at most four digits, as in "1.25 GiB".

    Args:
        nbytes: the size in bytes.
        down: whether to round down rather than to the nearest number.
    """
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            value = nbytes / size
            digits = 2 if value < 10 else 1 if value < 100 else 0
            if down:
                value = math.floor(value * 10**digits) / 10**digits
            number = f"{value:,.{digits}f}"
            return f"{number.rstrip('0').rstrip('.') if digits else number} {unit}"
    return f"{nbytes} bytes"
