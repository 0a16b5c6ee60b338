"""Parse and format sizes and rates."""

from __future__ import annotations

import re

__all__ = ["gibibytes", "parse_bytes"]

_UNITS = ("KiB", "MiB", "GiB", "TiB")
_SIZE = re.compile(r"(\d+)\s*(KiB|MiB|GiB|TiB)?")


def gibibytes(nbytes: float) -> str:
    """Format a number of bytes in GiB, with at least three digits, and without the unit."""
    value = nbytes / (1 << 30)
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def parse_bytes(text: str) -> int:
    """Parse a size such as "16GiB", "16 GiB" or "17179869184", and return the number of bytes.

    Raises:
        ValueError: the text is not a size.
    """
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{text!r} is not a size: give a number of bytes, or a size such as 16GiB")
    return int(found[1]) << (10 * (_UNITS.index(found[2]) + 1) if found[2] else 0)
