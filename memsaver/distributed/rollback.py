"""The way back: what a call changed on this rank, and how that is undone."""

from __future__ import annotations

import functools
from collections.abc import Callable

from memsaver.handles import Call, state
from memsaver.native import Backup, State
from memsaver.statistics import TagStats, stats
from memsaver.transitions import pause, resume

__all__ = ["Rollback"]


class Rollback:
    """The states of a call's tags before it, to go back to. Whoever makes it has their turn.

    Attributes:
        done: whether `undo` was called. After it:
        stuck: the state of each tag that could not go back, and why; "" if all did.
        warning: what to warn of where all went back, but a callback failed; else "".
        errors: what it met.
    """

    def __init__(self, call: Call) -> None:
        names = dict.fromkeys([*call.out, *call.into])
        self._before = {name: state(name) for name in names}
        rows: dict[str, list[TagStats]] = {}
        for row in stats().tags:
            rows.setdefault(row.tag, []).append(row)
        self._kept = {
            name: _kept_in(rows[name]) for name in names if self._before[name] is State.PAUSED
        }
        self.done = False
        self.stuck = self.warning = ""
        self.errors: list[BaseException] = []

    def undo(self) -> None:
        """Pause what was resumed since, with its contents, and resume what was paused.

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
                f"a call that failed on another rank was undone here, but a callback failed: {why}"
            )

    def _is_back(self, name: str) -> bool:
        return state(name) is self._before[name]

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as error:
            self.errors.append(error)


def _kept_in(rows: list[TagStats]) -> Backup:
    """Where a paused tag's contents are, and go again if it is paused once more; or nowhere."""
    # Pages of a paused tag are those that a failed pause had to keep, with their contents.
    if not any(row.backup_bytes or row.resident_bytes for row in rows):
        return Backup.NONE
    policy = rows[0].backup
    if policy is not Backup.NONE:
        return policy
    on_disk = any(row.disk_bytes for row in rows)  # by the call's own choice of a backup
    return Backup.DISK if on_disk else Backup.HOST
