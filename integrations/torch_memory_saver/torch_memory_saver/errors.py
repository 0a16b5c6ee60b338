"""Report errors with the program's tags instead of memsaver's internal tags."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from memsaver._runtime.native import BACKUPS, PART_MARK
from memsaver.errors import MemsaverError

__all__ = ["program_tags"]

# The suffix of an internal tag's name, unchanged or as `repr` escapes it.
_ENDS = re.compile(rf"(?:{PART_MARK}|{re.escape(repr(PART_MARK)[1:-1])})(?:{'|'.join(BACKUPS)})")
_REPEATED = re.compile(r"('[^']*')(?:, \1)+")


@contextlib.contextmanager
def program_tags() -> Iterator[None]:
    """Replace internal tags in the message and the `tag` of errors that the block raises.

    Can be used as a decorator. An error's `holders` still name the internal tags, as
    `memsaver.stats` does.
    """
    try:
        yield
    except MemsaverError as error:
        if PART_MARK in error.tag or _ENDS.search(error.message):
            error.message = _REPEATED.sub(r"\1", _ENDS.sub("", error.message))
            error.args = (error.message,)
            error.tag = error.tag.partition(PART_MARK)[0]
        raise
