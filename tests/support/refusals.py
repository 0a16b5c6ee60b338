"""Calls that must raise, in the code of a child process."""

from __future__ import annotations


def raises(kind, call, *arguments, **named) -> str:
    """Make the call, which must raise an error of that class; return the error's text."""
    try:
        call(*arguments, **named)
    except kind as error:
        return str(error)
    raise AssertionError(f"{call} did not raise {kind}")
