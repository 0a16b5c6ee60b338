"""Files that are written whole or not at all: of a full disk no half of one is left."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["replace_file"]


def replace_file(target: Path, content: bytes) -> None:
    """Put the content into the file, which is replaced where it is there, its mode kept.

    Of a link, what it leads to is replaced. A device or a pipe is written to.

    Raises:
        OSError: the file cannot be written, and is as it was; it names the target.
    """
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)
        else:
            _replace(target.resolve(), content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from None


def _replace(target: Path, content: bytes) -> None:
    # Short, and not made from the target's name, which may be as long as names can be.
    fresh = target.with_name(f".memsaver-{os.urandom(4).hex()}")
    try:
        with open(fresh, "xb") as file:
            file.write(content)
        if target.exists():
            os.chmod(fresh, target.stat().st_mode)
        os.replace(fresh, target)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
