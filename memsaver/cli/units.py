"""Format seconds and rates."""

from __future__ import annotations

__all__ = ["format_rate", "format_seconds"]


def format_rate(bytes_per_second: float) -> str:
    """Return a text such as "55.3 GiB/s", in the units of sizes."""
    for unit in ("B/s", "KiB/s", "MiB/s", "GiB/s"):
        if abs(bytes_per_second) < 1000:  # 1023 would have one more digit
            return f"{bytes_per_second:.1f} {unit}"
        bytes_per_second /= 1024
    return f"{bytes_per_second:.1f} TiB/s"


def format_seconds(seconds: float) -> str:
    """Return a text such as "20 us", "4.3 ms" or "1.25 s"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s"
