"""Giving the memory of SGLang's tags back and taking it again, by memsaver, on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import memsaver
from memsaver.errors import MemsaverError, NotLoadedError
from memsaver.handles import Call
from memsaver.integrations.sglang.protocol import RankReport
from memsaver.integrations.sglang.ranks import Figures, Group, first_failure
from memsaver.interrupts import interrupts_deferred
from memsaver.native import _C, State, emit_warnings
from memsaver.parts import names_of
from memsaver.reports import Report
from memsaver.transitions import pause_call

__all__ = ["are_memsavers", "is_mapped", "pause", "resume"]


def are_memsavers(tags: Sequence[str]) -> bool:
    """Whether memsaver has memory of one of these tags, and not another saver."""
    return bool(_names(tags))


def is_mapped(tags: Sequence[str]) -> bool:
    """Whether this rank has memory of one of these tags."""
    return any(memsaver.state(name) is not State.PAUSED for name in _names(tags))


def resume(group: Group, tags: Sequence[str]) -> list[RankReport]:
    """Resume the tags on every rank; what has memory is left as it is. Collective."""

    def work() -> Figures | None:
        names = _names(tags)
        # To memsaver, no tags would mean all of them.
        return _figures(memsaver.resume(*names), names, tags) if names else None

    ranks: list[RankReport] = group.attempt(work)
    return ranks


def pause(group: Group, tags: Sequence[str]) -> list[RankReport]:
    """Pause the tags on every rank; what is paused is left as it is. Collective.

    In two steps: it is begun on all ranks, and done when none has refused, so that what can be
    refused is refused before contents without a backup are given up. Where it was refused, no rank
    has changed; where it fails after that, some ranks have paused.
    """
    # An interrupt is raised after the exchange, so that a rank never leaves the others waiting.
    with interrupts_deferred(), ExitStack() as held:
        begun = _Pause(tags, held)
        ranks: list[RankReport] = group.attempt(begun.begin)
        if not first_failure(ranks):
            ranks = group.attempt(begun.run)
    emit_warnings(stacklevel=2)
    return ranks


class _Pause:
    """A pause in two steps, on this rank. It is given up when `held` ends, if it was not done."""

    def __init__(self, tags: Sequence[str], held: ExitStack) -> None:
        self._tags = tags
        self._held = held
        self._names: dict[str, str] = {}
        self._call: Call | None = None

    def begin(self) -> None:
        self._names = _names(self._tags)
        if not self._names:  # which would mean all of them
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
    """SGLang's tag of each of memsaver's tags behind these; {} where another saver has them."""
    try:
        return {name: tag for tag in tags for name in names_of(tag)}
    except NotLoadedError:
        return {}
