"""Parts of a tag, for regions of the same tag that request different backups.

In memsaver, a tag has one backup policy, but in other libraries, each region of a tag chooses its
own. Therefore, an adapter splits a tag into one part for each policy. The first part is the tag
itself. The policy of the first part is the tag's own policy or, if the tag has none, the policy
that was requested first. Each other part is a separate tag, whose name consists of the tag's name,
U+001F and the backup's name. All parts are paused and resumed in one call. A program's regions
cannot use such names, so a part never collides with another tag.

All functions are safe on any thread and in finalizers, because they acquire no lock and start no
thread.
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
    _C.region_tag()  # creates the process-wide tag, if one is set
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
    """Return the names of a tag's parts, for one call to `pause` or `resume`.

    The result is empty if no region has ever named the tag. The result includes `tag` itself, even
    if the program created the tag through memsaver's own interface.

    Raises:
        ConfigError: the tag is invalid.
    """
    check_tag(tag)
    parts = [tag, *(_part(tag, backup) for backup in BACKUPS)]
    return tuple(name for name in parts if policy_of(name) is not None)


def split(name: str) -> tuple[str, Backup]:
    """Split a part's name into the tag and the part's backup.

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
