"""Parts of a tag: regions of one tag that ask for different backups.

A tag of memsaver has one backup policy. Other libraries let each region of a tag choose, so an
adapter gives every policy of a tag a part of its own: the policy that the tag has already, or that
comes first, is the tag itself, and any other one is a tag beside it, TAG, U+001F and the backup's
name. The parts are paused and resumed in one call. No program can enter a region with such a name,
so the parts of one tag never meet another tag of the program.

Every function may be called on any thread and in finalizers: none takes a lock or starts a thread.
"""

from __future__ import annotations

from memsaver.errors import InvalidStateError, UnknownTagError
from memsaver.handles import state
from memsaver.native import (
    _C,
    PART_MARK,
    Backup,
    PartName,
    State,
    backup_of,
    check_new_tag,
    check_tag,
)

__all__ = ["name_of", "names_of", "split"]


def name_of(tag: str, backup: str) -> str:
    """Return the name of the part in which a new region of a tag keeps contents in `backup`.

    Raises:
        ConfigError: the tag cannot be one.
        InvalidStateError: a part of the tag is paused.
    """
    check_new_tag(tag)
    _C.region_tag()  # makes the tag of the process known, if it has one
    for name in names_of(tag):
        if state(name) is State.PAUSED:
            raise InvalidStateError(
                f"a region of tag {tag!r} cannot be entered while the tag is paused: resume it "
                "first",
                tag=tag,
            )
    wanted = Backup(backup)
    policy = _policy(tag) or _first.setdefault(tag, wanted)
    return tag if policy is wanted else _part(tag, wanted)


def names_of(tag: str) -> tuple[str, ...]:
    """Return the names of a tag's parts, to pause and resume in one call.

    Empty if no region ever named the tag. A tag that the program made with memsaver itself counts.

    Raises:
        ConfigError: the tag cannot be one.
    """
    check_tag(tag)
    parts = [tag, *(_part(tag, backup) for backup in Backup)]
    return tuple(name for name in parts if _policy(name) is not None)


def split(name: str) -> tuple[str, Backup]:
    """Return the tag that a known name belongs to, and the backup of this part of it.

    Raises:
        UnknownTagError: no region ever named it.
    """
    tag, mark, backup = name.partition(PART_MARK)
    return tag, Backup(backup) if mark else backup_of(_C.tag_backup(name))


def _part(tag: str, backup: Backup) -> PartName:
    return PartName(f"{tag}{PART_MARK}{backup.value}")


def _policy(name: str) -> Backup | None:
    """The backup policy of a tag, or None if no region ever named it."""
    try:
        return backup_of(_C.tag_backup(name))
    except UnknownTagError:
        return None


# The first policy that was asked for a tag that no region has named yet: of threads that enter its
# first regions at once, one decides. setdefault() is one step to other threads.
_first: dict[str, Backup] = {}
