"""Seconds and rates as people read them."""

from __future__ import annotations

__all__ = ["format_rate", "format_seconds"]


def format_rate(bytes_per_second: float) -> str:
    """Such as "55.3 GB/s": in powers of ten, as buses are rated."""
    for unit in ("B/s", "kB/s", "MB/s", "GB/s"):
        if abs(bytes_per_second) < 1000:
            return f"{bytes_per_second:.1f} {unit}"
        bytes_per_second /= 1000
    return f"{bytes_per_second:.1f} TB/s"


def format_seconds(seconds: float) -> str:
    """Such as "20 us", "4.3 ms" or "1.25 s"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s"
