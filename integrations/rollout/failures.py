"""Serialized errors, which allow one rank's error to be raised on all ranks."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memsaver.distributed.errors import RankFailure, failed
from memsaver.distributed.messages import FailureRecord
from memsaver.errors import MemsaverError, OutOfDeviceMemoryError

from ..engine.messages import Failure, kind_of
from .pickles import PICKLES, pack, unpack

__all__ = ["SerializedError", "clear_frames", "error_of", "is_shortage", "noting"]


def is_shortage(error: BaseException) -> bool:
    """Return whether an error of memsaver or of torch reports a shortage of device memory."""
    return kind_of(Failure.of(error)) is OutOfDeviceMemoryError


def clear_frames(error: BaseException) -> None:
    """Delete the local variables of the calls in which an error and its causes were raised.

    These variables may keep a bucket of weights alive. If one of them is the error itself, only
    garbage collection would free the bucket. Calls that are still running keep their variables.
    """
    seen: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in seen:
        for frame, _ in traceback.walk_tb(one.__traceback__):
            # A suspended coroutine would end. Calls in progress cannot be cleared.
            if not frame.f_code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
                with contextlib.suppress(RuntimeError):
                    frame.clear()
        seen.append(one)
        one = one.__cause__


@contextlib.contextmanager
def noting(error: BaseException, what: str) -> Iterator[None]:
    """Run a block after an error; an exception in the block is added to the error as a note.

    Only an interrupt or an exit propagates from the block.

    Args:
        error: the error, which the caller raises after the block.
        what: a description of the block, for the note.
    """
    try:
        yield
    except Exception as second:
        text = f"after this error, {what} failed: {type(second).__name__}: {second}"
        if hasattr(error, "add_note"):
            error.add_note(text)
        else:  # Python 3.10, which does not show notes
            setattr(error, "__notes__", [*getattr(error, "__notes__", []), text])  # noqa: B010


@dataclass(frozen=True)
class SerializedError:
    """A serialized error: an exception and the rank that raised it.

    Attributes:
        failure: the description of the exception, for a `RankError`.
        error: the exception itself, if it is a memsaver error and can be pickled; otherwise None.
    """

    failure: RankFailure
    error: MemsaverError | None

    @classmethod
    def of(cls, rank: int, error: BaseException) -> SerializedError:
        """Create the serialized error for a rank's exception."""
        known = error if isinstance(error, MemsaverError) else None
        return cls(FailureRecord.of(error, "").failure(rank), known)

    def packed(self) -> bytes:
        """Serialize the error to bytes that `parse` can read on any rank."""
        try:
            error = PICKLES.pack_error(self.error) if self.error is not None else b""
        except Exception:  # the exception cannot be pickled, or its class needs other arguments
            error = b""
        return pack((self.failure, error))

    @staticmethod
    def parse(data: bytes) -> SerializedError:
        """Return the error from the bytes that a rank's `packed` returned."""
        failure, packed = unpack(data)
        try:
            error = unpack(packed) if packed else None
        except Exception:  # this rank does not have the class
            error = None
        return SerializedError(failure, error)


def error_of(what: str, errors: Sequence[SerializedError], size: int) -> MemsaverError:
    """Return the error to raise on all ranks.

    Args:
        what: a description of the call, for error messages.
        errors: the errors of the ranks that failed.
        size: the number of ranks.

    Returns:
        If all of `errors` are memsaver errors of one class, an error of that class; otherwise a
        `RankError`. torch's `OutOfMemoryError` is treated as an `OutOfDeviceMemoryError`.
        The returned error's attribute `failures` maps ranks to their failures.
    """
    general = failed(what, size, {one.failure.rank: one.failure for one in errors}, "")
    known = [_known(one) for one in errors]
    error = known[0]
    if error is None or len(set(map(type, known))) > 1:
        return general
    error.message = general.message
    vars(error)["failures"] = general.failures
    return error


def _known(one: SerializedError) -> MemsaverError | None:
    """Return the rank's error as a memsaver error; None if that is not possible."""
    if one.error is not None:
        return one.error
    kind = kind_of(Failure(one.failure.kind, one.failure.message))
    return kind(one.failure.message) if kind is OutOfDeviceMemoryError else None
