"""How an error of one rank becomes the same error on all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memsaver.distributed.errors import RankFailure, failed
from memsaver.distributed.messages import Account
from memsaver.errors import MemsaverError
from memsaver.integrations.rollout.pickles import PICKLES, pack, unpack

__all__ = ["Told", "error_of"]


@dataclass(frozen=True)
class Told:
    """An exception, as the rank that it failed on tells it.

    Attributes:
        failure: the exception in words, for a `RankError`.
        error: the exception itself, if it is one of memsaver's and can travel; else None.
    """

    failure: RankFailure
    error: MemsaverError | None

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Told:
        """What a rank tells of an exception."""
        known = error if isinstance(error, MemsaverError) else None
        return cls(Account.of(error, "").failure(rank), known)

    def packed(self) -> bytes:
        """For `parse` on all ranks."""
        try:
            error = PICKLES.pack_error(self.error) if self.error is not None else b""
        except Exception:  # its parts do not travel, or its class wants other arguments
            error = b""
        packed: bytes = pack((self.failure, error))
        return packed

    @staticmethod
    def parse(data: bytes) -> Told:
        """What a rank packed."""
        failure, packed = unpack(data)
        try:
            error = unpack(packed) if packed else None
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
        One of the kind that failed, if all are of one kind of memsaver's; else a `RankError`. Both
        have `failures` by rank.
    """
    general = failed(what, size, {one.failure.rank: one.failure for one in told}, "")
    error = told[0].error
    if error is None or len({type(one.error) for one in told}) > 1:
        return general
    error.message = general.message
    vars(error)["failures"] = general.failures
    return error
