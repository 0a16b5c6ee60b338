"""The rollback of a failed call, which restores the states that the tags had before the call."""

from __future__ import annotations

import functools
from collections.abc import Callable

from memsaver._inspection.statistics import TagStats, stats
from memsaver._runtime.native import Backup
from memsaver._transitions.handles import Call, state
from memsaver._transitions.transitions import pause, resume

__all__ = ["Rollback"]


class Rollback:
    """The states of a call's tags before the call. The creating thread must own the reservation.

    Attributes:
        done: whether `undo` was called. The method `undo` sets the other attributes.
        stuck: the state of each tag that was not restored, and the reason; "" if all tags were
            restored.
        warning: a warning if all tags were restored but a callback failed, otherwise "".
        errors: the errors that occurred.
    """

    def __init__(self, call: Call) -> None:
        names = dict.fromkeys([*call.out, *call.into])
        self._before = {name: state(name) for name in names}
        rows: dict[str, list[TagStats]] = {}
        for row in stats().tags:
            rows.setdefault(row.tag, []).append(row)
        self._kept = {
            name: _kept_in(rows[name]) for name in names if self._before[name] == "paused"
        }
        self.done = False
        self.stuck = self.warning = ""
        self.errors: list[BaseException] = []

    def undo(self) -> None:
        """Pause the tags that the call resumed, with their contents, and resume the tags that it
        paused.

        Raises nothing.
        """
        self.done = True
        changed = [name for name, before in self._before.items() if state(name) is not before]
        by_backup: dict[Backup, list[str]] = {}
        for name in changed:
            if name in self._kept:
                by_backup.setdefault(self._kept[name], []).append(name)
        for backup, names in by_backup.items():
            self._try(functools.partial(pause, *names, backup=backup))
        mapped = [name for name in changed if name not in self._kept]
        if mapped:
            self._try(lambda: resume(*mapped))
        self._conclude(changed)

    def _conclude(self, changed: list[str]) -> None:
        still = [f"{name!r} is {state(name)}" for name in changed if not self._is_back(name)]
        why = "; ".join(f"{type(error).__name__}: {error}" for error in self.errors)
        if still:
            self.stuck = f"tag {', '.join(still)} ({why})"
        elif self.errors:
            self.warning = (
                "a call that failed on another rank was undone on this rank, but a callback "
                f"failed: {why}"
            )

    def _is_back(self, name: str) -> bool:
        return state(name) is self._before[name]

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as error:
            self.errors.append(error)


def _kept_in(rows: list[TagStats]) -> Backup:
    """Return the backup with which to re-pause a tag that was paused before the call."""
    # A paused tag has resident pages only if a failed pause retained them, with their contents.
    if not any(row.backup_bytes or row.resident_bytes for row in rows):
        return "none"
    policy = rows[0].backup
    if policy != "none":
        return policy
    # The pause's own `backup` overrode the policy; the kind of memory in use shows which backup
    # the pause used.
    if any(row.peer_bytes for row in rows):
        return "peer"
    on_disk = any(row.disk_bytes for row in rows)
    return "disk" if on_disk else "host"
