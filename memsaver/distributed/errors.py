"""Errors of a call on all ranks, and their messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memsaver.errors import MemsaverError

__all__ = ["GroupError", "RankError", "RankFailure", "after_rollback", "disagreed", "failed"]

_MOST = 8  # maximum number of reasons in a message; the attributes contain all of them


@dataclass(frozen=True)
class RankFailure:
    """The failure of one rank, or its call if the ranks made different calls.

    Attributes:
        rank: the rank in the world, not in the group.
        host: the name of the rank's machine.
        kind: the name of the exception's class; "" if the ranks made different calls.
        status: `MemsaverError.status`, or "" for other exceptions.
        tag: `MemsaverError.tag`, or "".
        message: the exception's text; if the ranks made different calls, the call of this rank.
            Truncated to 8,192 characters; on the rank itself, the error's `__cause__` is the whole
            exception.
    """

    rank: int
    host: str
    kind: str
    status: str
    tag: str
    message: str

    @property
    def reason(self) -> str:
        """The exception's class and text."""
        return f"{self.kind}: {self.message}" if self.kind else self.message


class RankError(MemsaverError):
    """The call failed on some ranks and was rolled back on the others. The same on every rank.

    Attributes:
        failures: the failures by rank; if the ranks made different calls, the call of every rank.
        stuck: for each rank whose rollback also failed, the states of its tags and the reason.
            Empty if all ranks' tags are unchanged.
    """

    _status = "RANK_FAILED"
    failures: dict[int, RankFailure]
    stuck: dict[int, RankFailure]


class GroupError(MemsaverError):
    """The ranks cannot reach each other: a rank died, hangs, or never made the call.

    This rank has undone its changes, unless the message says otherwise. The other surviving ranks
    have done so too, except that a rank that had received all outcomes before the loss may have
    returned. `__cause__` is torch's error.

    Attributes:
        missing: the ranks that are known not to have arrived.
    """

    _status = "GROUP_FAILED"
    missing: tuple[int, ...] = ()


def failed(what: str, size: int, failures: dict[int, RankFailure], after: str) -> RankError:
    """Return the error for a call that failed on some ranks.

    Args:
        what: a description of the call.
        size: the number of ranks that made the call.
        failures: the exceptions, by rank.
        after: a description of the state after the failure, with advice.
    """
    error = RankError(
        f"{what} failed on {ranks_text(failures)} of {size}: {_by_reason(failures.values())}"
        f"{'; ' if after else ''}{after}",
        tag=next((failure.tag for failure in failures.values() if failure.tag), ""),
    )
    error.failures, error.stuck = failures, {}
    return error


def disagreed(calls: dict[int, RankFailure], after: str) -> RankError:
    """Return the error for ranks that made different calls. See `failed`."""
    error = RankError(
        f"the ranks of a group must make the same call: {_by_reason(calls.values())}; {after}"
    )
    error.failures, error.stuck = calls, {}
    return error


def after_rollback(stuck: dict[int, RankFailure]) -> str:
    """Describe the ranks' state after a rollback that failed on the ranks in `stuck`."""
    if not stuck:
        return "all ranks' tags are unchanged, and the call may be repeated"
    return (
        f"the rollback failed on {ranks_text(stuck)}: {_by_reason(stuck.values())}; pause or "
        "resume the tags on these ranks first; the tags of the other ranks are unchanged"
    )


def ranks_text(ranks: Iterable[int]) -> str:
    """Format ranks for a message: "rank 3", "ranks 0-3, 7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {text}"


def _by_reason(failures: Iterable[RankFailure]) -> str:
    """Return each distinct reason once, with its ranks, and the host if only one rank has it."""
    by_reason: dict[str, list[RankFailure]] = {}
    for failure in failures:
        by_reason.setdefault(failure.reason, []).append(failure)
    texts = [
        f"{ranks_text(f.rank for f in group)} ({group[0].host}): {reason}"
        if len(group) == 1 and group[0].host
        else f"{ranks_text(f.rank for f in group)}: {reason}"
        for reason, group in list(by_reason.items())[:_MOST]
    ]
    if len(by_reason) > _MOST:
        texts.append(f"and {len(by_reason) - _MOST} more reasons, in the error's attributes")
    return "; ".join(texts)
