"""Pauses and resumes an engine's tags through memsaver, on all ranks or on none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import memsaver
from memsaver._runtime.interrupts import interrupts_deferred
from memsaver._runtime.native import _C, emit_warnings
from memsaver._transitions.handles import Call
from memsaver._transitions.parts import names_of
from memsaver._transitions.reports import Report
from memsaver._transitions.transitions import pause_call
from memsaver.errors import MemsaverError, NotLoadedError

from .messages import RankReport
from .ranks import Figures, Group, first_failure

__all__ = ["are_memsavers", "is_mapped", "pause", "resume"]


def are_memsavers(tags: Sequence[str]) -> bool:
    """Return whether memsaver, rather than another saver, allocated memory in one of these tags."""
    return bool(_names(tags))


def is_mapped(tags: Sequence[str]) -> bool:
    """Return whether memory of one of these tags is mapped on this rank."""
    return any(memsaver.state(name) != "paused" for name in _names(tags))


def resume(group: Group, tags: Sequence[str]) -> list[RankReport]:
    """Resume the tags on every rank; mapped tags stay as they are. Collective."""

    def work() -> Figures | None:
        names = _names(tags)
        # Without names, memsaver would resume all tags.
        return _figures(memsaver.resume(*names), names, tags) if names else None

    return group.attempt(work)


def pause(group: Group, tags: Sequence[str]) -> list[RankReport]:
    """Pause the tags on every rank; paused tags stay as they are. Collective.

    Runs in two steps: all ranks begin the pause, and run it if no rank has rejected it, so that a
    rejection precedes any loss of contents without a backup. After a rejection no rank has
    changed; after a later failure some ranks have paused.
    """
    # An interrupt is raised after the exchange, so that a rank never leaves the others waiting.
    with interrupts_deferred(), ExitStack() as held:
        begun = _Pause(tags, held)
        ranks = group.attempt(begun.begin)
        if not first_failure(ranks):
            ranks = group.attempt(begun.run)
    emit_warnings(stacklevel=2)
    return ranks


class _Pause:
    """A pause in two steps, on this rank. Closing `held` cancels a pause that has not run."""

    def __init__(self, tags: Sequence[str], held: ExitStack) -> None:
        self._tags = tags
        self._held = held
        self._names: dict[str, str] = {}
        self._call: Call | None = None

    def begin(self) -> None:
        self._names = _names(self._tags)
        if not self._names:  # an empty list would mean all tags
            return
        names = list(self._names)
        self._held.enter_context(_C.Reservation(names))
        call = pause_call(names, None)
        self._call = call
        self._held.callback(self._give_up)
        call.begin()

    def run(self) -> Figures | None:
        if self._call is None:
            return None
        report = self._call.run()
        self._call = None
        return _figures(report, self._names, self._tags)

    def _give_up(self) -> None:
        if self._call is not None:
            self._call.abandon(MemsaverError("a rank could not pause"))


def _figures(report: Report, names: Mapping[str, str], tags: Sequence[str]) -> Figures:
    device, copied = dict.fromkeys(tags, 0), dict.fromkeys(tags, 0)
    for change in report.changes:
        device[names[change.tag]] += change.device_bytes
        copied[names[change.tag]] += change.copied_bytes
    return Figures(report.seconds, device, copied)


def _names(tags: Sequence[str]) -> dict[str, str]:
    """Map memsaver's tags to the engine's; return {} if another saver manages the memory."""
    try:
        return {name: tag for tag in tags for name in names_of(tag)}
    except NotLoadedError:
        return {}
