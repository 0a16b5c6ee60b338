"""Parts of a tag: regions of one tag that request different backups.

A tag of memsaver has one backup policy, but in other libraries each region of a tag chooses one. An
adapter therefore splits a tag into a part for each policy. The tag itself is the part with
the tag's own policy, or, if it has none, with the policy that was requested first. Each other part
is a separate tag, whose name consists of the tag's name, U+001F and the backup's name. The parts
are paused and resumed in one call. memsaver rejects such names in a program's regions, so a part
never collides with another tag.

Every function may be called on any thread and in finalizers: none takes a lock or starts a thread.
"""

from __future__ import annotations

from memsaver._memory.choices import expect_empty
from memsaver._runtime.native import (
    _C,
    BACKUPS,
    PART_MARK,
    Backup,
    PartName,
    check_new_tag,
    check_tag,
    checked_backup,
    policy_of,
)
from memsaver._transitions.handles import state
from memsaver.errors import InvalidStateError

__all__ = ["name_of", "names_of", "split"]


def name_of(tag: str, backup: str) -> str:
    """Return the name of a tag's part for regions with this backup.

    Raises:
        ConfigError: the tag is invalid.
        InvalidStateError: a part of the tag is paused.
    """
    check_new_tag(tag)
    _C.region_tag()  # creates the process's own tag, if it is set
    for name in names_of(tag):
        if state(name) == "paused":
            raise InvalidStateError(
                f"a region of tag {tag!r} cannot be entered while the tag is paused: resume it "
                "first",
                tag=tag,
            )
    wanted = checked_backup(backup)
    policy = policy_of(tag) or _first.setdefault(tag, wanted)
    name = tag if policy == wanted else _part(tag, wanted)
    expect_empty(name)
    return name


def names_of(tag: str) -> tuple[str, ...]:
    """Return the names of a tag's parts, to pause and resume in one call.

    Empty if no region has ever named the tag. Includes `tag` itself even if the program created it
    through memsaver's own interface.

    Raises:
        ConfigError: the tag is invalid.
    """
    check_tag(tag)
    parts = [tag, *(_part(tag, backup) for backup in BACKUPS)]
    return tuple(name for name in parts if policy_of(name) is not None)


def split(name: str) -> tuple[str, Backup]:
    """Split a part's name into its tag and the part's backup.

    Raises:
        UnknownTagError: no region has ever named the part.
    """
    tag, mark, backup = name.partition(PART_MARK)
    if not mark:
        state(name)  # raises for an unknown tag
    return tag, checked_backup(backup if mark else policy_of(name))


def _part(tag: str, backup: Backup) -> PartName:
    return PartName(f"{tag}{PART_MARK}{backup}")


# By tag, the policy of its first region. If several threads enter a tag's first regions at once,
# setdefault(), which is atomic, decides.
_first: dict[str, Backup] = {}
