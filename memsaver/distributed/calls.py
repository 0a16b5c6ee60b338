"""Pause, resume and swap on all ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from memsaver._runtime.blocks import block
from memsaver._runtime.interrupts import signals_deferred
from memsaver._runtime.native import _C, Backup
from memsaver._transitions.handles import Call, state
from memsaver._transitions.transitions import pause_call, resume_call, swap_call
from memsaver.distributed.agreement import run_on_all_ranks
from memsaver.distributed.reports import GroupReport
from memsaver.distributed.words import listed, side

__all__ = ["pause", "paused", "resume", "swap"]


def pause(
    *tags: str, group: Any = None, backup: Backup | None = None, timeout: float | None = None
) -> GroupReport:
    """Release the device memory of `tags` on every rank of the group, or on none.

    The call is a collective. When the call returns, the memory is free on all ranks. See
    `memsaver.pause` for contents, callbacks and unfinished work on each rank.

    Args:
        tags: the tags, the same on all ranks, in any order; if empty, all tags of the rank.
        group: a `torch.distributed` group that includes this rank; None means the world. If one
            rank passes an invalid group, see `memsaver.distributed`.
        backup: as in `memsaver.pause`. Each rank may choose its own backup.
        timeout: seconds to wait for the other ranks at each step, including the slowest rank's
            copies and its wait for other processes that use a tensor of the tags (at most the
            option `importer_seconds`); None means the group's own timeout.

    Raises:
        RankError: the call failed on a rank, or the ranks made different calls. Every rank raises
            the same error. The tags that this call paused are mapped again with their contents, but
            contents without a backup may read as zero (see `memsaver.distributed`).
        GroupError: a rank died, hung, or did not make the call in time. This rank has undone its
            changes.
        InvalidStateError: torch.distributed is not initialized, or this rank is not in the group.
        NotLoadedError: torch is not installed, or the group needs gloo and torch lacks it.
    """
    return run_on_all_ranks(*_pause(tags, backup), group, timeout)


def resume(*tags: str, group: Any = None, timeout: float | None = None) -> GroupReport:
    """Map physical memory at the addresses of `tags` again, on every rank of the group or on none.

    The call is a collective. When the call returns, the memory is mapped on all ranks, with its
    saved contents.

    Args:
        tags: as in `pause`.
        group: as in `pause`.
        timeout: as in `pause`.

    Raises:
        RankError: the call failed on a rank (for example, out of memory), or the ranks made
            different calls. Every rank raises the same error. The tags that this call resumed are
            paused again with the same contents. Backup views created before the call are invalid.
        GroupError: a rank died, hung, or did not make the call in time. This rank has undone its
            changes.
        InvalidStateError, NotLoadedError: see `pause`.
    """
    return run_on_all_ranks(
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
    backup: Backup | None = None,
    timeout: float | None = None,
) -> GroupReport:
    """Pause `out` and resume `into` in one transition, on every rank of the group or on none.

    The call is a collective. See `memsaver.swap` for the transition on each rank.

    Args:
        out: the tag, or tags, to pause; the same on all ranks, in any order.
        into: the tag, or tags, to resume; the same on all ranks, in any order.
        group: as in `pause`.
        backup: as in `pause`, for `out`.
        timeout: as in `pause`.

    Raises:
        RankError: the call failed on a rank, or the ranks made different calls. Every rank raises
            the same error and has undone its changes. Contents with a backup are intact, but
            contents without a backup may be lost.
        GroupError: a rank died, hung, or did not make the call in time. This rank has undone its
            changes.
        InvalidStateError, NotLoadedError: see `pause`.
    """
    return run_on_all_ranks(
        lambda: f"swap(out={side(out)}, into={side(into)})",
        lambda: swap_call(out, into, backup),
        group,
        timeout,
    )


@block
def paused(
    *tags: str, group: Any = None, backup: Backup | None = None, timeout: float | None = None
) -> Iterator[GroupReport]:
    """Pause `tags` on every rank for the duration of a block, then resume the newly paused tags.

    The start and the end of the block are collectives. A rank that leaves the block early, for
    example after an exception, waits at the end of the block for the other ranks. Yields the
    pause's report. The arguments and errors are the same as for `pause` and `resume`. If the resume
    fails, the tags stay paused on all ranks.
    """
    going: list[tuple[str, ...]] = []
    try:
        with signals_deferred():  # an interrupt must not lose the tags to resume
            report = run_on_all_ranks(
                *_pause(tags, backup), group, timeout, lambda report: going.append(report.changed)
            )
        yield report
    finally:
        if going:
            _C.uninterrupted(partial(_resume_paused, tags, going[0], group, timeout), True)


def _pause(
    tags: Sequence[str], backup: Backup | None
) -> tuple[Callable[[], str], Callable[[], Call]]:
    """Return the first two arguments of `run_on_all_ranks` for a pause."""
    return lambda: f"pause({listed(tags) or 'every tag'})", lambda: pause_call(tags, backup)


def _resume_paused(
    tags: Sequence[str],
    going: Sequence[str],
    group: Any,
    timeout: float | None,
) -> None:
    run_on_all_ranks(
        lambda: f"resume(the tags paused by paused({listed(tags) or 'every tag'}))",
        lambda: Call("resume", [], [tag for tag in going if state(tag) == "paused"], -1),
        group,
        timeout,
    )
