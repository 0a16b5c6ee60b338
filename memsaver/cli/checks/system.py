"""Files of the system, and which distributions are installed."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path

__all__ = ["installed_version", "mount_path", "read_system_file"]


def read_system_file(path: str) -> str | None:
    """The text of a file of the system, stripped; None where it cannot be read.

    MEMSAVER_TEST_SYSTEM_ROOT, for tests, names a folder to look in instead, as in the library.
    """
    root = os.environ.get("MEMSAVER_TEST_SYSTEM_ROOT", "")
    try:
        return Path(root + path).read_text(errors="replace").strip()
    except OSError:
        return None


def mount_path(text: str) -> str:
    """A path as /proc/self/mountinfo writes it, with blanks as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution; None where there is none. Imports nothing of it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
