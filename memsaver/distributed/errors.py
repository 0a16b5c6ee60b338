"""Errors of a call on all ranks, and their messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memsaver.errors import MemsaverError

__all__ = ["GroupError", "RankError", "RankFailure", "after_rollback", "disagreed", "failed"]

_MOST = 8  # maximum number of reasons in a message; the attributes contain all of them


@dataclass(frozen=True)
class RankFailure:
    """The failure of one rank, or the rank's call if the ranks made different calls.

    Attributes:
        rank: the rank in the world, not in the group.
        host: the name of the rank's machine.
        kind: the name of the exception's class; "" if the ranks made different calls.
        status: the error's `MemsaverError.status`, or "" for other exceptions.
        tag: the error's `MemsaverError.tag`, or "".
        message: the exception's text, truncated to 8,192 characters. On the rank itself, the
            error's `__cause__` is the original exception. If the ranks made different calls, the
            text describes this rank's call.
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
    """A call failed on some ranks and was rolled back on the others. Every rank raises this error.

    Attributes:
        failures: the failures by rank. If the ranks made different calls, the dictionary contains
            the calls of all ranks.
        stuck: the states of the tags, and the reason, for each rank whose rollback also failed. The
            dictionary is empty if the tags of all ranks are unchanged.
    """

    _status = "RANK_FAILED"
    failures: dict[int, RankFailure]
    stuck: dict[int, RankFailure]


class GroupError(MemsaverError):
    """The ranks cannot reach each other, because a rank died, hung, or never made the call.

    Unless the message says otherwise, this rank has undone its changes. The other surviving ranks
    have also undone their changes, except any rank that received all outcomes before the connection
    was lost. On such a rank, the call may have returned successfully. `__cause__` is torch's error.

    Attributes:
        missing: the ranks known to be missing from the call.
    """

    _status = "GROUP_FAILED"
    missing: tuple[int, ...] = ()


def failed(what: str, size: int, failures: dict[int, RankFailure], after: str) -> RankError:
    """Return the error for a call that failed on some ranks.

    Args:
        what: a description of the call.
        size: the number of ranks that made the call.
        failures: the failures by rank.
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
    """Return the error for ranks that made different calls. See `failed` for the arguments."""
    error = RankError(
        f"the ranks of a group must make the same call: {_by_reason(calls.values())}; {after}"
    )
    error.failures, error.stuck = calls, {}
    return error


def after_rollback(stuck: dict[int, RankFailure]) -> str:
    """Describe the state of the ranks after a rollback that failed on the ranks in `stuck`."""
    if not stuck:
        return "all ranks' tags are unchanged, and the call may be repeated"
    return (
        f"the rollback failed on {ranks_text(stuck)}: {_by_reason(stuck.values())}; pause or "
        "resume the tags on these ranks first; the tags of the other ranks are unchanged"
    )


def ranks_text(ranks: Iterable[int]) -> str:
    """Format ranks for a message, such as "rank 3" or "ranks 0-3, 7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {text}"


def _by_reason(failures: Iterable[RankFailure]) -> str:
    """Return each distinct reason with its ranks, and with the host if there is only one rank."""
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
