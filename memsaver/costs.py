"""What silently costs, told once for each tag as a `PerformanceWarning`.

Cheap: it looks at figures that a transition has at hand, and asks torch nothing of its own. Nothing
here can make a transition fail: the warnings come when it is over, to whoever waits for it.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import ParamSpec

from memsaver.errors import PerformanceWarning
from memsaver.native import _C, Backup, backup_of, note
from memsaver.text import size_text

__all__ = ["after_pause", "backup_seen", "before_resume", "look_at_dead_blocks"]

LARGE_BYTES = 256 << 20
"""What is less costs too little to speak of."""

Arguments = ParamSpec("Arguments")

_told: set[tuple[str, str]] = set()  # what, and of which tag
_kept: dict[str, int] = {}  # large backups that nobody has read: bytes that the pause left
_dropped: dict[str, int] = {}  # how many times such a backup was never read
_exit_process: int | None = None  # where `_at_exit` is registered


def _harmless(check: Callable[Arguments, None]) -> Callable[Arguments, None]:
    @functools.wraps(check)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            check(*args, **kwargs)
        except Exception:
            pass  # a warning that is missed, rather than a transition

    return checked


@_harmless
def look_at_dead_blocks(tags: Iterable[str], dead: list[tuple[int, int]]) -> None:
    """Before a pause with a backup: `dead` are address and bytes of blocks without a tensor."""
    tags = [tag for tag in tags if ("dead", tag) not in _told]
    if not tags or sum(nbytes for _, nbytes in dead) < LARGE_BYTES:
        return
    wasted: dict[str, int] = {}
    for address, nbytes in dead:
        found = _C.locate(address)
        if found is not None:
            wasted[found[0]] = wasted.get(found[0], 0) + nbytes
    allocated = _sums("allocated_bytes")
    for tag in tags:
        bytes_dead, bytes_all = wasted.get(tag, 0), allocated.get(tag, 0)
        if bytes_dead >= LARGE_BYTES and 2 * bytes_dead > bytes_all:
            _tell(
                "dead",
                tag,
                f"of the {size_text(bytes_all)} of tag {tag!r}, {size_text(bytes_dead)} are blocks "
                "that no tensor owns: they take device memory whenever the tag is not paused; give "
                "back what temporary tensors left with torch.cuda.empty_cache() after the region, "
                "or make such tensors under memsaver.disabled()",
            )


@_harmless
def after_pause(
    tags: Iterable[str], backup: int, changes: Iterable[tuple[str, int, bool, int, int]]
) -> None:
    """After a pause of the tags: the call's backup as in the C ABI, and the rows of its report."""
    given: dict[str, int] = {}
    for tag, _, _, device_bytes, _ in changes:
        given[tag] = given.get(tag, 0) + device_bytes
    large = [tag for tag in tags if given.get(tag, 0) >= LARGE_BYTES]
    saved = _sums("backup_bytes") if large else {}
    for tag in large:
        kept = saved.get(tag, 0)
        if kept < LARGE_BYTES:
            continue
        _kept[tag] = kept
        _register_exit()
        policy = backup_of(_C.tag_backup(tag) if backup < 0 else backup)
        spare = _C.host_memory()[1] if policy is Backup.PAGEABLE else 0
        if spare >= kept:
            _tell(
                "pageable",
                tag,
                f"tag {tag!r} keeps {size_text(kept)} in pageable memory, on a machine with "
                f"{size_text(spare)} to spare for backups: pinned memory, backup='host', is copied "
                "to and from several times as fast",
            )


@_harmless
def before_resume(tags: Iterable[str]) -> None:
    """Before a resume of the tags."""
    large = {tag: _kept.pop(tag) for tag in tags if tag in _kept}
    saved = _sums("backup_bytes") if large else {}
    for tag, kept in large.items():
        unread = kept - saved.get(tag, 0)
        if unread < LARGE_BYTES or 2 * unread < kept:
            continue
        _dropped[tag] = _dropped.get(tag, 0) + 1
        if _dropped[tag] == 2:
            _tell(
                "unread",
                tag,
                f"tag {tag!r} was paused with a backup of {size_text(kept)}, and for the second "
                f"time {size_text(unread)} of it are never read: their tensors were deleted while "
                "it was paused; delete them before the pause, or pause with backup='none'",
            )


@_harmless
def backup_seen(address: int) -> None:
    """The program has looked at what a pause kept of the memory there: it was of use."""
    found = _C.locate(address) if _kept else None
    if found is not None:
        _kept.pop(found[0], None)


def _register_exit() -> None:
    global _exit_process
    if _exit_process is None:
        _exit_process = os.getpid()
        atexit.register(_at_exit)


@_harmless
def _at_exit() -> None:
    """Told at the exit: backups of a process that never resumed their tags."""
    if os.getpid() != _exit_process or hasattr(sys, "last_value"):
        return  # a forked child's exit; one by an exception, which may have come in between
    saved, resumes = _sums("backup_bytes"), _sums("resumes")
    for tag in list(_kept):
        kept = saved.get(tag, 0)
        if kept >= LARGE_BYTES and resumes.get(tag, 0) == 0:
            warnings.warn(
                f"tag {tag!r} was paused with a backup of {size_text(kept)} and never resumed "
                "until the process ended: where nobody needs the contents again, pause with "
                "backup='none', which copies nothing",
                PerformanceWarning,
                stacklevel=1,
            )


def _tell(what: str, tag: str, text: str) -> None:
    if (what, tag) not in _told:
        _told.add((what, tag))
        note(text)


def _sums(figure: str) -> dict[str, int]:
    """A figure of each tag, over its devices."""
    sums: dict[str, int] = {}
    for row in _C.stats():
        sums[str(row["tag"])] = sums.get(str(row["tag"]), 0) + int(row[figure])
    return sums
