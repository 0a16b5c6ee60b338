"""Access to system files and installed distributions."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path

__all__ = ["installed_version", "mount_path", "read_system_file"]


def read_system_file(path: str) -> str | None:
    """Return the stripped text of a system file, or None if the file cannot be read.

    In tests, the variable MEMSAVER_TEST_SYSTEM_ROOT names a directory that replaces the root of
    /proc and /sys, as in the native library.
    """
    root = os.environ.get("MEMSAVER_TEST_SYSTEM_ROOT", "")
    try:
        return Path(root + path).read_text(errors="replace").strip()
    except OSError:
        return None


def mount_path(text: str) -> str:
    """Decode a path in /proc/self/mountinfo, in which octal escapes represent blanks."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None. Does not import it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
