"""Serialised errors, with which an error of one rank is raised on all."""

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
    """A serialised error: an exception and the rank that raised it.

    Attributes:
        failure: the exception in words, for a `RankError`.
        error: the exception itself, if it is memsaver's and can be pickled; else None.
    """

    failure: RankFailure
    error: MemsaverError | None

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Told:
        """Make the serialised error of a rank's exception."""
        known = error if isinstance(error, MemsaverError) else None
        return cls(Account.of(error, "").failure(rank), known)

    def packed(self) -> bytes:
        """Return the bytes for `parse` on all ranks."""
        try:
            error = PICKLES.pack_error(self.error) if self.error is not None else b""
        except Exception:  # it cannot be pickled, or its class needs other arguments
            error = b""
        packed: bytes = pack((self.failure, error))
        return packed

    @staticmethod
    def parse(data: bytes) -> Told:
        """Read the bytes that a rank packed."""
        failure, packed = unpack(data)
        try:
            error = unpack(packed) if packed else None
        except Exception:  # this rank does not have the class
            error = None
        return Told(failure, error)


def error_of(what: str, told: Sequence[Told], size: int) -> MemsaverError:
    """Return the error to raise on all ranks.

    Args:
        what: the call in words.
        told: the errors of the ranks that failed.
        size: the number of ranks.

    Returns:
        An error of the same class as the ranks' errors, if these are memsaver's and all of one
        class; else a `RankError`. Both have `failures` by rank.
    """
    general = failed(what, size, {one.failure.rank: one.failure for one in told}, "")
    error = told[0].error
    if error is None or len({type(one.error) for one in told}) > 1:
        return general
    error.message = general.message
    vars(error)["failures"] = general.failures
    return error
