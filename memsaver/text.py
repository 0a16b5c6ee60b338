"""Sizes and names in messages."""

from __future__ import annotations

__all__ = ["plain_text", "size_text"]


def plain_text(text: str) -> str:
    """The text on one line, without what a terminal would take for a command."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def size_text(nbytes: int) -> str:
    """In the largest unit that it fills, with four digits at most: "512 MiB", "1.25 GiB"."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            value = nbytes / size
            digits = 2 if value < 10 else 1 if value < 100 else 0
            number = f"{value:,.{digits}f}"
            return f"{number.rstrip('0').rstrip('.') if digits else number} {unit}"
    return f"{nbytes} bytes"
