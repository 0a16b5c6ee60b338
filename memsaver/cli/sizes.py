"""Sizes as people write and read them: in KiB, MiB, GiB and TiB."""

from __future__ import annotations

import re

__all__ = ["format_bytes", "gigabytes", "parse_bytes"]

_UNITS = ("KiB", "MiB", "GiB", "TiB")
_SIZE = re.compile(r"(\d+)\s*(KiB|MiB|GiB|TiB)?")


def format_bytes(nbytes: int) -> str:
    """Four digits and a unit at most: "512 MiB", "1.25 GiB"."""
    if nbytes < 1024:
        return f"{nbytes} bytes"
    value, unit = nbytes / 1024, 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    digits = 2 if value < 10 else 1 if value < 100 else 0
    number = f"{value:,.{digits}f}"
    return f"{number.rstrip('0').rstrip('.') if digits else number} {_UNITS[unit]}"


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
