"""Sizes as people write them, and rates as they read them."""

from __future__ import annotations

import re

__all__ = ["gigabytes", "parse_bytes"]

_UNITS = ("KiB", "MiB", "GiB", "TiB")
_SIZE = re.compile(r"(\d+)\s*(KiB|MiB|GiB|TiB)?")


def gigabytes(nbytes: float) -> str:
    """Billions of bytes, as rates are told: three digits at least, without the unit."""
    value = nbytes / 1e9
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def parse_bytes(text: str) -> int:
    """The bytes of "16GiB", "16 GiB" or "17179869184".

    Raises:
        ValueError: it is neither.
    """
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{text!r} is no size: give a number of bytes, or one such as 16GiB")
    return int(found[1]) << (10 * (_UNITS.index(found[2]) + 1) if found[2] else 0)
