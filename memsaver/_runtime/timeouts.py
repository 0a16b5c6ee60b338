"""Validate timeouts, and convert deadlines to timeouts."""

from __future__ import annotations

import time

from memsaver.errors import ConfigError

__all__ = ["LONGEST_SECONDS", "check_timeout", "is_timeout", "seconds_until"]

LONGEST_SECONDS = 1e7  # the system's limit for waits


def check_timeout(timeout: object, name: str = "timeout", *, optional: bool = False) -> None:
    """Raise `ConfigError` unless `timeout` is a positive number of seconds, at most 1e7.

    This function raises no other exception, whatever the value of `timeout`.

    Args:
        timeout: the value to check.
        name: the argument's name, for the error message.
        optional: whether None is also valid.
    """
    if timeout is None and optional:
        return
    if is_timeout(timeout):
        return
    try:
        shown = repr(timeout)
    except Exception:
        shown = f"a {type(timeout).__name__}"
    wanted = f"a positive number of seconds, at most {LONGEST_SECONDS:g}"
    wanted += ", or None" if optional else ""
    raise ConfigError(f"{name} must be {wanted}, not {shown}")


def is_timeout(timeout: object) -> bool:
    """Return whether the value is a positive number of seconds, at most 1e7. Never raises."""
    # Compares the type, because an object may override `isinstance` checks and comparisons.
    kind = type(timeout)
    if not issubclass(kind, int | float) or kind is bool:
        return False
    try:
        return bool(0 < timeout <= LONGEST_SECONDS)  # type: ignore[operator]
    except Exception:
        return False


def seconds_until(deadline: float, least: float = 0.001) -> float:
    """Return the seconds until a `time.monotonic` deadline, but at least `least`."""
    return max(least, deadline - time.monotonic())
