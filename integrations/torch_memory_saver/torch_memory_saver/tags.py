"""Tags whose regions may differ in their backups, over memsaver's, which have one backup each.

A tag is one or more tags of memsaver, its members: the first backup that its regions ask for has
the tag's own name, each further one a name with the backup in it. They are paused and resumed in
one call. Any thread.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import memsaver

__all__ = ["Member", "Tags"]


@dataclass(frozen=True)
class Member:
    """A tag of memsaver's, and what it stands for."""

    name: str
    tag: str
    backup: str


class Tags:
    """The tags of a process, and their members."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: dict[str, Member] = {}  # by memsaver's name

    def member(self, tag: str, backup: str) -> Member:
        """The member for a tag's regions with that backup, made if it is not there."""
        with self._lock:
            for member in self._members.values():
                if (member.tag, member.backup) == (tag, backup):
                    return member
            first = all(member.tag != tag for member in self._members.values())
            name = tag if first else f"{tag} ({backup})"
            while name in self._members:  # another tag is called so
                name += "'"
            return self._members.setdefault(name, Member(name, tag, backup))

    def open_member(self, tag: str, backup: str) -> Member:
        """The member for a new region.

        Raises:
            InvalidStateError: a part of the tag is paused.
        """
        for name in self.known(tag):
            if memsaver.state(name) is memsaver.State.PAUSED:
                raise memsaver.InvalidStateError(
                    f"a region of tag {tag!r} cannot be entered while the tag is paused: resume it "
                    "first"
                )
        return self.member(tag, backup)

    def find(self, name: str) -> Member | None:
        """The member that memsaver knows under a name."""
        with self._lock:
            return self._members.get(name)

    def known(self, tag: str) -> list[str]:
        """What belongs to a tag, by the names of memsaver; none where nothing ever did."""
        with self._lock:
            names = [member.name for member in self._members.values() if member.tag == tag]
        return [name for name in names or [tag] if _is_known(name)]


def _is_known(name: str) -> bool:
    try:
        memsaver.state(name)
    except memsaver.UnknownTagError:
        return False
    return True
