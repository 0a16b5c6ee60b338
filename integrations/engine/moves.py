"""Pauses and resumes an engine's tags through memsaver, on all ranks or on none."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack

import memsaver
from memsaver._runtime.native import _C, Backup, emit_warnings, policy_of
from memsaver._transitions.handles import Call
from memsaver._transitions.parts import names_of
from memsaver._transitions.reports import Report
from memsaver._transitions.transitions import pause_call
from memsaver.errors import MemsaverError, NotLoadedError

from .messages import RankReport
from .ranks import Figures, Group, first_failure
from .tags import KV_CACHE

__all__ = ["are_memsavers", "is_mapped", "pause", "paused_bytes", "resume"]


def are_memsavers(tags: Sequence[str]) -> bool:
    """Return whether memsaver, not another saver, has allocated memory in any of these tags."""
    return bool(_names(tags))


def is_mapped(tags: Sequence[str]) -> bool:
    """Return whether any of these tags has mapped memory on this rank."""
    return any(memsaver.state(name) != "paused" for name in _names(tags))


def paused_bytes(tags: Sequence[str]) -> int:
    """Return an upper bound on the device memory that a resume of these tags maps on this rank."""
    known = memsaver.stats()
    rows = (row for name in _names(tags) for row in known[name] if row.state != "mapped")
    return sum(max(row.paused_now_bytes, row.last_paused_bytes) for row in rows)


def resume(group: Group, tags: Sequence[str], unrestored: Collection[str] = ()) -> list[RankReport]:
    """Resume the tags on every rank; mapped tags do not change. Collective.

    Args:
        group: the ranks.
        tags: the engine's tags.
        unrestored: the subset of `tags` whose contents are about to be overwritten. These tags are
            resumed last, so that a failure leaves all of them paused with their contents intact.
    """

    def work() -> Figures:
        start = time.perf_counter()
        names = _names(tags)
        reports = []
        for restore in (True, False):
            chosen = [name for name, tag in names.items() if (tag not in unrestored) == restore]
            if chosen:  # without names, memsaver would resume all tags
                reports.append(memsaver.resume(*chosen, restore=restore))
        seconds = time.perf_counter() - start
        return _figures(seconds, reports, names, tags) if names else Figures()

    return group.attempt(work)


def pause(
    group: Group, tags: Sequence[str], backups: Mapping[str, Backup] | None = None
) -> list[RankReport]:
    """Pause the tags on every rank; paused tags do not change. Collective.

    Args:
        group: the ranks.
        tags: the engine's tags.
        backups: the backup that this pause uses, by tag; other tags use their regions' policies.

    The pause has two steps: all ranks begin the pause, and run it only if no rank has rejected it.
    A rejected pause therefore changes nothing on any rank, and no contents without a backup are
    lost. After a later failure, some ranks have paused some tags. On a rank that failed, the tags
    whose pause failed or did not run are mapped with their contents, and the other tags are paused.
    A KV cache that was discarded has lost its contents. The rank's report contains its first error.
    """

    def both_steps() -> list[RankReport]:
        with ExitStack() as held:
            begun = _Pause(tags, backups or {}, held)
            ranks = group.attempt(begun.begin)
            return ranks if first_failure(ranks) else group.attempt(begun.run)

    # Signal handlers run at the end, or while this rank waits for a tag. An exception from a
    # handler during such a wait counts as this rank's failure, so that the other ranks never wait
    # in vain.
    ranks = _C.uninterrupted(both_steps)
    emit_warnings(stacklevel=2)
    return ranks


class _Pause:
    """A pause on this rank, in two steps.

    Closing `held` before the pause has run cancels the pause.

    The pause consists of one or more calls to memsaver: see `_steps`.
    """

    def __init__(self, tags: Sequence[str], backups: Mapping[str, Backup], held: ExitStack) -> None:
        self._tags = tags
        self._backups = backups
        self._held = held
        self._names: dict[str, str] = {}
        self._seconds = 0.0  # the duration of begin()
        self._begun: list[list[Call]] = []  # by step
        self._unpaused: list[Call] = []

    def begin(self) -> None:
        self._names = _names(self._tags)
        if not self._names:  # an empty list would mean all tags
            return
        self._held.enter_context(_C.Reservation(list(self._names)))
        self._held.callback(self._give_up)
        start = time.perf_counter()
        for step in self._steps():
            self._begun.append([])
            for backup, names in step:
                call = pause_call(names, backup)
                self._begun[-1].append(call)
                self._unpaused.append(call)
                call.begin()
        self._seconds = time.perf_counter() - start

    def run(self) -> Figures:
        if not self._begun:
            return Figures()
        start = time.perf_counter()
        reports = []
        for calls in self._begun:
            reports += self._run_step(calls)
        seconds = self._seconds + time.perf_counter() - start
        return _figures(seconds, reports, self._names, self._tags)

    def _run_step(self, calls: Sequence[Call]) -> list[Report]:
        """Run the calls concurrently, and raise the first error after all of them have ended."""
        _C.Transition.run_all([call.native for call in calls if call.native is not None])
        reports, first = [], None
        for call in calls:
            try:
                reports.append(call.run())
                self._unpaused.remove(call)
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first
        return reports

    def _steps(self) -> list[list[tuple[Backup | None, list[str]]]]:
        """Group the names into steps; each step is a list of (backup to pass, names) pairs.

        The pauses of a step run together.

        If all tags to save already have backups, the first step saves them and discards the KV
        cache, so that the driver clears the cache's memory during the copies. If the save fails,
        the loss of the cache is harmless, because the engine has already flushed the cache. If the
        pause of the cache fails, the saved tags are still paused.

        Otherwise, the pauses run one after the other, because a first save is the most likely to
        fail, for lack of host memory. The order is: all pauses with the regions' own policies, in
        one call; pauses with other backups; and pauses that discard contents that the policy would
        save.
        """
        policies = {name: policy_of(name) for name in self._names}
        wanted = {
            name: self._backups.get(tag) or policies[name] for name, tag in self._names.items()
        }
        saving = {name for name in wanted if wanted[name] != "none"}
        is_safe = bool(saving) and saving <= _with_backups()
        found: dict[tuple[int, Backup | None], list[str]] = {}
        for name, backup in wanted.items():
            if is_safe and backup == "none" and self._names[name] == KV_CACHE:
                order = 0
            else:
                order = 2 if backup == "none" != policies[name] else 1
            chosen = None if backup == policies[name] else backup
            found.setdefault((order, chosen), []).append(name)
        together, alone = [], []
        for (order, chosen), names in sorted(found.items(), key=lambda one: one[0][0]):
            if is_safe and order < 2:
                together.append((chosen, names))
            else:
                alone.append([(chosen, names)])
        return [step for step in (together, *alone) if step]

    def _give_up(self) -> None:
        for call in self._unpaused:
            call.abandon(MemsaverError("a rank could not pause"))


def _with_backups() -> set[str]:
    """Return the tags that are empty or still own the memory of an earlier pause's backup."""
    # memsaver.stats() would also read the system's memory, which takes longer.
    rows = [(str(row["tag"]), row) for row in _C.stats()]
    has_memory = {tag for tag, row in rows if row["allocated_bytes"]}
    has_backup = {
        tag for tag, row in rows if row["host_bytes"] or row["disk_bytes"] or row["peer_bytes"]
    }
    return {tag for tag, _ in rows} - (has_memory - has_backup)


def _figures(
    seconds: float, reports: Sequence[Report], names: Mapping[str, str], tags: Sequence[str]
) -> Figures:
    device, copied = dict.fromkeys(tags, 0), dict.fromkeys(tags, 0)
    for change in itertools.chain.from_iterable(report.changes for report in reports):
        device[names[change.tag]] += change.device_bytes
        copied[names[change.tag]] += change.copied_bytes
    return Figures(seconds, device, copied)


def _names(tags: Sequence[str]) -> dict[str, str]:
    """Map memsaver's tags to the engine's tags; return {} if another saver manages the memory."""
    try:
        return {name: tag for tag in tags for name in names_of(tag)}
    except NotLoadedError:
        return {}
