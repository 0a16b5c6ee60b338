"""What a call on all ranks raises where it could not be done, and in which words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memsaver.errors import MemsaverError

__all__ = ["GroupError", "RankError", "RankFailure", "after_rollback", "disagreed", "failed"]

_MOST = 8  # different reasons in one message; the attributes have all


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
            Cut to 8,192 characters; the rank itself has the whole exception as its error's
            `__cause__`.
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
    """The call failed on some ranks, and was undone on all others. The same on every rank.

    Attributes:
        failures: by rank, the failure; if the ranks made different calls, the call of every rank.
        stuck: for each rank whose rollback failed too, the states of its tags and the reason.
            Empty if every rank is as it was before the call.
    """

    _status = "RANK_FAILED"
    failures: dict[int, RankFailure]
    stuck: dict[int, RankFailure]


class GroupError(MemsaverError):
    """The ranks cannot reach each other: one died, hangs, or never made the call.

    This rank has undone its changes, unless the message says otherwise. So have the other living
    ranks, but a rank that had every rank's answer before the loss may have returned. `__cause__` is
    torch's error.

    Attributes:
        missing: the ranks that are known not to have come as far as this one.
    """

    _status = "GROUP_FAILED"
    missing: tuple[int, ...] = ()


def failed(what: str, size: int, failures: dict[int, RankFailure], after: str) -> RankError:
    """Return the error of a call that failed on some ranks.

    Args:
        what: the call in words.
        size: the number of ranks that made the call.
        failures: the exceptions, by rank.
        after: the state after the failure and the advice, in words.
    """
    error = RankError(
        f"{what} failed on {ranks_text(failures)} of {size}: {_by_reason(failures.values())}"
        f"{'; ' if after else ''}{after}",
        tag=next((failure.tag for failure in failures.values() if failure.tag), ""),
    )
    error.failures, error.stuck = failures, {}
    return error


def disagreed(calls: dict[int, RankFailure], after: str) -> RankError:
    """Return the error of ranks that made different calls. See `failed`."""
    error = RankError(
        f"the ranks of a group must make the same call: {_by_reason(calls.values())}; {after}"
    )
    error.failures, error.stuck = calls, {}
    return error


def after_rollback(stuck: dict[int, RankFailure]) -> str:
    """Return the ranks' state after a rollback that failed on the ranks in `stuck`, in words."""
    if not stuck:
        return "every rank is as it was before the call, and the call may be made again"
    return (
        f"the rollback failed on {ranks_text(stuck)}: {_by_reason(stuck.values())}; pause or "
        "resume the tags there first; the other ranks are as they were before the call"
    )


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks in words: "rank 3", "ranks 0-3, 7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {text}"


def _by_reason(failures: Iterable[RankFailure]) -> str:
    """Every reason once, with its ranks and where one of them runs."""
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
