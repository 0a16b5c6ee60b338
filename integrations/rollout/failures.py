"""How an error of one rank becomes the same error on all."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from memsaver.distributed.errors import RankError, RankFailure, ranks_text
from memsaver.errors import MemsaverError
from memsaver.integrations.rollout.pickles import pack, travels, unpack

__all__ = ["Told", "error_of"]

_MESSAGE_CHARACTERS = 8192  # an engine's error may have a whole log in it


@dataclass(frozen=True)
class Told:
    """An exception, as the rank that it failed on tells it.

    Attributes:
        failure: what a `RankError` says of it.
        error: the exception itself, where it is one of memsaver's and can travel; else None.
    """

    failure: RankFailure
    error: MemsaverError | None

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Told:
        """What a rank tells of an exception."""
        known = error if isinstance(error, MemsaverError) else None
        message = (str(error) or type(error).__name__)[:_MESSAGE_CHARACTERS]
        failure = RankFailure(
            rank,
            socket.gethostname(),
            type(error).__name__,
            known.status if known else "",
            known.tag if known else "",
            message,
        )
        return cls(failure, known)

    def packed(self) -> bytes:
        """For `parse` on all ranks."""
        error = self.error if travels(self.error) else None
        packed: bytes = pack((self.failure, pack(error)))
        return packed

    @staticmethod
    def parse(data: bytes) -> Told:
        """What a rank packed."""
        failure, packed = unpack(data)
        try:
            error = unpack(packed)
        except Exception:  # of a kind that this rank does not have
            error = None
        return Told(failure, error)


def error_of(what: str, told: Sequence[Told], size: int) -> MemsaverError:
    """The error for all ranks.

    Args:
        what: the call in words.
        told: by the ranks that failed.
        size: how many ranks there are.

    Returns:
        One of the kind that failed, where all are of one kind of memsaver's; else a `RankError`.
        Both have `failures` by rank.
    """
    failures = {one.failure.rank: one.failure for one in told}
    by_reason: dict[str, list[RankFailure]] = {}
    for failure in failures.values():
        by_reason.setdefault(failure.reason, []).append(failure)
    reasons = "; ".join(
        f"{ranks_text(f.rank for f in some)} of {size} ({some[0].host}): {reason}"
        for reason, some in by_reason.items()
    )
    message = f"{what} failed on {reasons}"
    kinds = {type(one.error) for one in told}
    error = told[0].error
    if error is None or len(kinds) > 1:
        error = RankError(message, tag=next((f.tag for f in failures.values() if f.tag), ""))
        error.stuck = {}
    error.message = message
    vars(error)["failures"] = failures
    return error
