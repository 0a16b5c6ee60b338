"""Checks of the directory for backups on disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator

from memsaver._runtime.native import _C
from memsaver._runtime.text import size_text
from memsaver.cli.checks.findings import Finding, bad, good, warned
from memsaver.cli.checks.system import mount_path, read_system_file
from memsaver.errors import ConfigError

__all__ = ["check_disk"]

LITTLE = 4 << 30  # too little disk space for the weights of any model
PAGE = 4096  # the alignment of direct transfers

_IN_MEMORY = ("tmpfs", "ramfs")
# Builds of Python with old kernel headers do not have the constant.
_O_TMPFILE = getattr(os, "O_TMPFILE", 0o20000000 | os.O_DIRECTORY)


def check_disk() -> list[Finding]:
    """Check the directory's free space, and its support for private backups and direct I/O."""
    try:
        asked = _C.option("disk_dir")
    except ConfigError:
        asked = os.environ.get("MEMSAVER_DISK_DIR", "")
        text = f"MEMSAVER_DISK_DIR={asked} cannot be used; see the option disk_dir below"
        advice = "set it to a directory that can be written to"
        return [bad("disk_dir", text, advice, directory=asked)]
    directory = asked or _default_directory()
    kind = _file_system(directory)
    data = {"directory": directory, "file_system": kind, "is_default": not asked}
    text = f"{directory}{'' if asked else ' (the default)'}, {kind or 'unknown file system'}"
    try:
        facts = os.statvfs(directory)
        with _private_file(directory) as (file, unnamed):
            direct = _is_direct(file)
    except OSError as error:
        advice = "set MEMSAVER_DISK_DIR to a directory that can be written to"
        return [bad("disk_dir", f"{text}: {error.strerror}", advice, **data)]
    free = facts.f_bavail * facts.f_frsize
    if kind in _IN_MEMORY:
        advice = "backups there stay in memory: set MEMSAVER_DISK_DIR to a disk"
        first = warned("disk_dir", text, advice, **data)
    else:
        first = good("disk_dir", text, **data)
    return [first, _privacy(unnamed), _direct(direct), _space(free)]


def _privacy(unnamed: bool) -> Finding:
    name = "disk_dir privacy"
    if unnamed:
        return good(name, "files without a name, for their owner only", unnamed=True)
    return warned(
        name,
        "files briefly have a name, because this file system cannot create files without one",
        "set MEMSAVER_DISK_DIR to a local file system (ext4, xfs, btrfs)",
        unnamed=False,
    )


def _direct(direct: bool) -> Finding:
    name = "disk_dir direct I/O"
    if direct:
        return good(name, "works: backups bypass the page cache", direct=True)
    return warned(
        name,
        "does not work here: backups go through the page cache, which is slower",
        "set MEMSAVER_DISK_DIR to a local disk's file system (ext4, xfs)",
        direct=False,
    )


def _space(free: int) -> Finding:
    text = f"{size_text(free)} free"
    if free < LITTLE:
        advice = "free disk space there, or set MEMSAVER_DISK_DIR to a larger disk"
        return warned("disk_dir space", text, advice, free_bytes=free)
    return good("disk_dir space", text, free_bytes=free)


def _default_directory() -> str:
    """Return the directory that the library uses if disk_dir is empty."""
    for candidate in (os.environ.get("TMPDIR", ""), "/var/tmp"):
        if os.path.isdir(candidate) and os.access(candidate, os.W_OK | os.X_OK):
            return candidate
    return "/tmp"


@contextlib.contextmanager
def _private_file(directory: str) -> Iterator[tuple[int, bool]]:
    """Yield a temporary file like the file of a backup, and whether the file never had a name."""
    unnamed = True
    try:
        flags = _O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        file = os.open(directory, flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        file, path = tempfile.mkstemp(dir=directory, prefix=".memsaver-")
        os.unlink(path)
        unnamed = False
    try:
        yield file, unnamed
    finally:
        os.close(file)


def _is_direct(file: int) -> bool:
    """Return whether a page can be written and read without the page cache."""
    with contextlib.closing(mmap.mmap(-1, PAGE)) as page:
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
            return os.pwritev(file, [page], 0) == PAGE and os.preadv(file, [page], 0) == PAGE
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False


def _file_system(directory: str) -> str | None:
    """Return the type of the directory's file system, such as "ext4"."""
    path, best, kind = os.path.realpath(directory), -1, None
    for line in (read_system_file("/proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        point = mount_path(before.split()[4]) if len(before.split()) > 4 else ""
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if point and inside and len(point) >= best:
            best, kind = len(point), after.split()[0]
    return kind
