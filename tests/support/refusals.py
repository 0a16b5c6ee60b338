"""Checks for calls that must raise, in the code of a child process."""

from __future__ import annotations

import contextlib
import types


@contextlib.contextmanager
def raising(kind):
    """Check that the block raises an error of this class; yield an object whose `error` is the
    error.
    """
    caught = types.SimpleNamespace(error=None)
    try:
        yield caught
    except kind as error:
        caught.error = error
    else:
        raise AssertionError(f"the block did not raise {kind}")


def refused(kind, call, *arguments, **named):
    """Make a call that must raise an error of this class; return the error."""
    with raising(kind) as caught:
        call(*arguments, **named)
    return caught.error


def raises(kind, call, *arguments, **named) -> str:
    """Make a call that must raise an error of this class; return the error's text."""
    return str(refused(kind, call, *arguments, **named))
