"""Calls that must raise, in the code of a child process."""

from __future__ import annotations


def raises(kind, call, *arguments, **named) -> str:
    """Makes the call, which must raise an error of that kind; gives its text."""
    try:
        call(*arguments, **named)
    except kind as error:
        return str(error)
    raise AssertionError(f"{call} did not raise {kind}")
