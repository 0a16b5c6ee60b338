"""Checks for probable mistakes: pauses that discard contents although no backup was chosen,
contradictory choices of a backup, and tags without memory.

A tag is undecided until one of its regions passes a backup. The variable MEMSAVER_BACKUP also
decides the process-wide tag (MEMSAVER_TAG). A call to `pause` fails if it passes no `backup` and
would discard LARGE_BYTES or more of undecided tags.

All functions are safe on any thread and in finalizers, because they acquire no lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from memsaver._memory.preload import is_preloaded
from memsaver._runtime.native import Backup, note, policy_of, tag_totals
from memsaver._runtime.text import size_text
from memsaver.errors import InvalidStateError, UsageWarning

__all__ = [
    "LARGE_BYTES",
    "NAMED",
    "check_chosen",
    "earlier_choice",
    "expect_empty",
    "note_choice",
    "warn_of_empty",
]

LARGE_BYTES = 256 << 20
"""A pause that would discard this many bytes or more needs a chosen backup."""

NAMED = 8
"""The maximum number of tags that an error names."""

_undecided: set[str] = set()
_process_tag = os.environ.get("MEMSAVER_TAG", "")
if _process_tag and not os.environ.get("MEMSAVER_BACKUP"):
    _undecided.add(_process_tag)
_paused: set[str] = set()  # tags that were paused before, or that need no warning

# Reasons why a tag has no memory.
_NOT_IN_REGIONS = (
    "no tensor was allocated on a GPU in its regions. Tensors that were created on the CPU, or "
    "moved to the GPU after the region, are not in the tag: move them to the GPU inside "
    "memsaver.region({!r})"
)
_NOT_PRELOADED = (
    "MEMSAVER_TAG is set, but memsaver's library is not preloaded, so it intercepts no "
    "allocations: start the process with `memsaver run --tag`"
)
_NOT_INTERCEPTED = (
    "the process has allocated no device memory outside regions through a CUDA runtime that is "
    "linked dynamically, which memsaver's library intercepts"
)


def expect_empty(tag: str) -> None:
    """Suppress the warning about pausing a tag without memory.

    Use this function for an integration's tags, which may get memory later.
    """
    _paused.add(tag)


def earlier_choice(tag: str, backup: Backup | None) -> Backup | None:
    """Return a tag's policy before one of its regions is entered, or None for a new tag.

    A new tag whose region passes no backup becomes undecided.
    """
    earlier = policy_of(tag)
    if earlier is None and backup is None:
        _undecided.add(tag)
    return earlier


def note_choice(tag: str, backup: Backup | None, earlier: Backup | None) -> None:
    """Record the backup that a region passed for its tag, after the region has been entered.

    Emits a warning if the region removes the backup that earlier regions chose and the tag still
    has memory from those regions.
    """
    if backup is None:
        return
    _undecided.discard(tag)
    if backup != "none" or earlier in (None, "none"):
        return
    nbytes = tag_totals([tag], "allocated_bytes")[tag]
    if nbytes:
        note(
            f"a region with backup='none' withdraws the backup {str(earlier)!r} of tag {tag!r}: "
            f"the next pause discards the tag's {size_text(nbytes)}. Use another tag for memory "
            "that needs no backup",
            UsageWarning,
        )


def check_chosen(tags: Iterable[str], backup: Backup | None) -> None:
    """Check that a pause does not discard many bytes of tags for which no backup was chosen.

    Args:
        tags: the tags to pause.
        backup: the backup that the pause passes, or None.

    Raises:
        InvalidStateError: undecided tags have LARGE_BYTES or more in total.
    """
    undecided = _undecided.intersection(tags)
    if backup is not None or not undecided:
        return
    sizes = tag_totals(undecided, "resident_bytes")
    total = sum(sizes.values())
    if total >= LARGE_BYTES:
        largest = sorted((tag for tag in sizes if sizes[tag]), key=lambda tag: (-sizes[tag], tag))
        some = f"tag{'s' if len(largest) > 1 else ''} {', '.join(map(repr, largest[:NAMED]))}"
        if (more := len(largest) - NAMED) > 0:
            some += f" and {more} other{'s' if more > 1 else ''}"
        where = "to the tag's regions, or to this call,"
        if _process_tag in largest:
            where = "to this call, or start the process with `memsaver run --backup host`,"
        raise InvalidStateError(
            f"this pause would discard {size_text(total)} of {some}, and no backup was chosen: "
            f"pass backup='host' {where} to keep the contents "
            "(memsaver.region lists other places), or backup='none' to discard them",
            tag=largest[0],
        )


def warn_of_empty(changes: Iterable[tuple[str, int, bool, int, int]]) -> None:
    """Warn about tags without memory at their first pause, based on the pause's report."""
    rows = [row for row in changes if row[0] not in _paused]
    _paused.update(row[0] for row in rows)
    for tag, device, *_ in rows:
        if device < 0:
            why = _NOT_IN_REGIONS.format(tag)
            if tag == _process_tag:
                why = _NOT_INTERCEPTED if is_preloaded() else _NOT_PRELOADED
            note(
                f"tag {tag!r} has no device memory, so its pause released nothing: {why}",
                UsageWarning,
            )
