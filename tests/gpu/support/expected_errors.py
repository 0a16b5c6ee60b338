"""A check that a block raises an error, for programs that do not use pytest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def raises(kind: type[BaseException]) -> Iterator[list[Any]]:
    """Check that the block raises this error; append the error to the list."""
    caught: list[Any] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
        return
    raise AssertionError(f"{kind.__name__} was not raised")
