"""Warnings about hidden costs: one `PerformanceWarning` for each tag and cost.

Costs below LARGE_BYTES are not reported. The checks are cheap, because they use statistics that a
transition already has, and do not query torch. A check never makes a transition fail. When the
transition has ended, the thread that waits for it emits the warnings.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import ParamSpec

from memsaver._memory.choices import LARGE_BYTES
from memsaver._runtime.native import _C, backup_of, note, policy_of, tag_totals
from memsaver._runtime.text import size_text
from memsaver.errors import PerformanceWarning

__all__ = ["after_pause", "backup_seen", "before_resume", "check_unowned_blocks"]

Arguments = ParamSpec("Arguments")

_reported: set[tuple[str, str]] = set()  # the costs that were reported, and their tags
_kept: dict[str, int] = {}  # by tag: bytes of large backups that have not been read
_dropped: dict[str, int] = {}  # by tag: how often at least half of such a backup was not restored
_exit_process: int | None = None  # the process in which `_at_exit` is registered


def _harmless(check: Callable[Arguments, None]) -> Callable[Arguments, None]:
    @functools.wraps(check)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            check(*args, **kwargs)
        except Exception:
            pass  # a lost warning is better than a failed transition

    return checked


@_harmless
def check_unowned_blocks(tags: Iterable[str], unowned: list[tuple[int, int]]) -> None:
    """Check the blocks (address, size) that no tensor owns, before a pause with a backup."""
    tags = [tag for tag in tags if ("unowned", tag) not in _reported]
    if not tags or sum(nbytes for _, nbytes in unowned) < LARGE_BYTES:
        return
    wasted: dict[str, int] = {}
    for address, nbytes in unowned:
        found = _C.locate(address)
        if found is not None:
            wasted[found[0]] = wasted.get(found[0], 0) + nbytes
    large = [tag for tag in tags if wasted.get(tag, 0) >= LARGE_BYTES]
    for tag, bytes_all in tag_totals(large, "allocated_bytes").items():
        bytes_unowned = wasted[tag]
        if 2 * bytes_unowned > bytes_all:
            _warn_once(
                "unowned",
                tag,
                f"of the {size_text(bytes_all)} of tag {tag!r}, {size_text(bytes_unowned)} are "
                "blocks that no tensor owns: they use device memory whenever the tag is not "
                "paused; release temporary tensors with torch.cuda.empty_cache() after the region, "
                "or create them under memsaver.disabled()",
            )


@_harmless
def after_pause(
    tags: Iterable[str], backup: int, changes: Iterable[tuple[str, int, bool, int, int]]
) -> None:
    """Check a pause, given the C ABI value of its backup policy and the rows of its report."""
    given: dict[str, int] = {}
    for tag, _, _, device_bytes, _ in changes:
        given[tag] = given.get(tag, 0) + device_bytes
    large = [tag for tag in tags if given.get(tag, 0) >= LARGE_BYTES]
    for tag, kept in tag_totals(large, "backup_bytes").items():
        if kept < LARGE_BYTES:
            continue
        _kept[tag] = kept
        _register_exit()
        policy = policy_of(tag) if backup < 0 else backup_of(backup)
        spare = _C.host_memory()[1] if policy == "pageable" else 0
        if spare >= kept:
            _warn_once(
                "pageable",
                tag,
                f"tag {tag!r} keeps {size_text(kept)} in pageable memory, on a machine with "
                f"{size_text(spare)} available for backups: pinned memory, backup='host', is "
                "copied to and from several times as fast",
            )


@_harmless
def before_resume(tags: Iterable[str]) -> None:
    """Check a resume of the tags before the resume begins."""
    large = {tag: _kept.pop(tag) for tag in tags if tag in _kept}
    saved = tag_totals(large, "backup_bytes")
    for tag, kept in large.items():
        unread = kept - saved[tag]
        if unread < LARGE_BYTES or 2 * unread < kept:
            continue
        _dropped[tag] = _dropped.get(tag, 0) + 1
        if _dropped[tag] == 2:
            _warn_once(
                "unread",
                tag,
                f"tag {tag!r} was paused with a backup of {size_text(kept)}, and for the second "
                f"time {size_text(unread)} of it are not restored, because their tensors were "
                "deleted while the tag was paused; delete them before the pause, or pause with "
                "backup='none'",
            )


@_harmless
def backup_seen(address: int) -> None:
    """Record that the program read the backup of the memory at `address`."""
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
    """Report, at interpreter exit, the backups of tags that were never resumed."""
    if os.getpid() != _exit_process or hasattr(sys, "last_value"):
        return  # in a forked child, or after an exception that may have prevented the resume
    resumes = tag_totals(_kept, "resumes")
    for tag, kept in tag_totals(_kept, "backup_bytes").items():
        if kept >= LARGE_BYTES and resumes[tag] == 0:
            warnings.warn(
                f"tag {tag!r} was paused with a backup of {size_text(kept)} and was not "
                "resumed before the process exited: if the contents are not needed, pause with "
                "backup='none', which copies nothing",
                PerformanceWarning,
                stacklevel=1,
            )


def _warn_once(what: str, tag: str, text: str) -> None:
    if (what, tag) not in _reported:
        _reported.add((what, tag))
        note(text, PerformanceWarning)
