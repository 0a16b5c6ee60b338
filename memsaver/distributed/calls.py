"""Pause, resume and swap on all ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from memsaver.blocks import block
from memsaver.distributed.agreement import together
from memsaver.distributed.reports import GroupReport
from memsaver.distributed.words import listed, side
from memsaver.handles import Call, state
from memsaver.interrupts import signals_deferred
from memsaver.native import _C, State
from memsaver.transitions import pause_call, resume_call, swap_call

__all__ = ["pause", "paused", "resume", "swap"]


def pause(
    *tags: str, group: Any = None, backup: str | None = None, timeout: float | None = None
) -> GroupReport:
    """Give the device memory of `tags` back on every rank of the group, or on none.

    A collective. When it returns, the memory is free on all ranks. What every rank does is
    `memsaver.pause`: see there for what it promises about contents, callbacks and work in flight.

    Args:
        tags: which ones, the same on all ranks, in any order; none at all means every tag that the
            rank has.
        group: a `torch.distributed` group that this rank is in; None is the world. See
            `memsaver.distributed` for a wrong one on one of the ranks.
        backup: as in `memsaver.pause`. Each rank may choose its own.
        timeout: seconds to wait for the other ranks at each step, and so for the slowest one's
            copies; None is the timeout that the group was made with.

    Raises:
        RankError: it failed on a rank, or the ranks did not make the same call. Every rank raises
            the same, and what this call paused is mapped again, with its contents; those without a
            backup may be zeros then (see `memsaver.distributed`).
        GroupError: a rank died, hangs, or did not come in time; this one went back alike.
        InvalidStateError: torch.distributed is not initialised, or this rank is not in the group.
        NotLoadedError: there is no torch, or none with gloo where the group needs it.
    """
    return together(
        lambda: f"pause({listed(tags) or 'every tag'})",
        lambda: pause_call(tags, backup),
        group,
        timeout,
    )


def resume(*tags: str, group: Any = None, timeout: float | None = None) -> GroupReport:
    """Map memory behind the addresses of `tags` again on every rank of the group, or on none.

    A collective. When it returns, all ranks have their memory and what was saved of it.

    Args:
        tags: as in `pause`.
        group: as in `pause`.
        timeout: as in `pause`.

    Raises:
        RankError: it failed on a rank (for want of memory, say), or the ranks did not make the same
            call. Every rank raises the same, and what this call resumed is paused again, with the
            contents that it had; backup views made before are no longer valid there.
        GroupError: a rank died, hangs, or did not come in time; this one went back alike.
        InvalidStateError, NotLoadedError: as from `pause`.
    """
    return together(
        lambda: f"resume({listed(tags) or 'every tag'})",
        lambda: resume_call(tags),
        group,
        timeout,
    )


def swap(
    *,
    out: str | Sequence[str],
    into: str | Sequence[str],
    group: Any = None,
    backup: str | None = None,
    timeout: float | None = None,
) -> GroupReport:
    """Pause `out` and resume `into` at once, on every rank of the group or on none.

    A collective, of what `memsaver.swap` does.

    Args:
        out: the tag, or tags, to pause; the same on all ranks, in any order.
        into: the tag, or tags, to resume; the same on all ranks, in any order.
        group: as in `pause`.
        backup: as in `pause`, for `out`.
        timeout: as in `pause`.

    Raises:
        RankError: it failed on a rank, or the ranks did not make the same call. Every rank raises
            the same and has gone back, with all contents that have a backup; those of tags without
            one may be gone.
        GroupError: a rank died, hangs, or did not come in time; this one went back alike.
        InvalidStateError, NotLoadedError: as from `pause`.
    """
    return together(
        lambda: f"swap(out={side(out)}, into={side(into)})",
        lambda: swap_call(out, into, backup),
        group,
        timeout,
    )


@block
def paused(
    *tags: str, group: Any = None, backup: str | None = None, timeout: float | None = None
) -> Iterator[GroupReport]:
    """Pause `tags` on every rank for the block, and resume what that paused, also after an error.

    Entering and leaving are collectives: a rank that leaves early, by an exception say, waits for
    the others there. Yields the pause's report. Arguments and errors are those of `pause` and
    `resume`; where the resume fails, the tags stay paused on all ranks.
    """
    resume_paused: Callable[[], None] | None = None
    try:
        with signals_deferred():  # an interrupt is raised at its end, when there is what to resume
            report = pause(*tags, group=group, backup=backup, timeout=timeout)
            going = report.local.changed
            resume_paused = partial(_resume_paused, tags, going, group, timeout)
        yield report
    finally:
        if resume_paused is not None:
            _C.uninterrupted(resume_paused, True)


def _resume_paused(
    tags: Sequence[str],
    going: Sequence[str],
    group: Any,
    timeout: float | None,
) -> None:
    together(
        lambda: f"resume(the tags that paused({listed(tags) or 'every tag'}) had paused)",
        lambda: Call("resume", [], [tag for tag in going if state(tag) is State.PAUSED], -1),
        group,
        timeout,
    )
