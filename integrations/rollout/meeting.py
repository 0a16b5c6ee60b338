"""Where ranks meet after each has done its part: all go on, or all hear who failed, and why."""

from __future__ import annotations

import socket
import struct
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

from memsaver.distributed import GroupError, RankError, RankFailure
from memsaver.distributed.channel import Channel
from memsaver.distributed.errors import disagreed, ranks_text
from memsaver.distributed.interrupts import interrupts_deferred
from memsaver.distributed.messages import Account, Record
from memsaver.errors import MemsaverError
from memsaver.integrations.rollout.stages import RankStage

__all__ = ["Meeting", "Part"]

_FIGURES = struct.Struct("<?16sdQQQ")  # failed, what (a digest), and the fields of a Part


@dataclass(frozen=True)
class Part:
    """What a rank tells of its part, as of `RankStage`."""

    seconds: float = 0.0
    peak_bytes: int = 0
    total_bytes: int = 0
    tag_bytes: int = 0


class Meeting:
    """The ranks of a group, or this process alone. Used by one thread.

    Args:
        group: a `torch.distributed` group; None is the world, or this process alone where
            torch.distributed is not initialised.

    Raises:
        ConfigError, InvalidStateError, NotLoadedError: as from `memsaver.distributed`.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        alone = group is None and not _is_initialized()
        self._channel = None if alone else Channel(group)

    @property
    def alone(self) -> bool:
        """Whether there is no group."""
        return self._channel is None

    def meet(
        self, what: str, part: Part, error: BaseException | None, timeout: float | None
    ) -> tuple[RankStage, ...]:
        """Tell all ranks how this one fared, and hear of the others. A collective.

        Args:
            what: what was done, in words; the same on all ranks.
            part: this rank's figures.
            error: what failed here, or None.
            timeout: seconds to wait for the others; None is the group's own timeout.

        Returns:
            Every rank's figures, where none failed.

        Raises:
            RankError: it failed on some ranks, or the ranks did different things. The same on all.
            GroupError: a rank died, hangs, or did not come in time.
            BaseException: `error`, where all ranks failed alike, or there is no other; and always
                where it is no `Exception`, such as an interrupt.
        """
        if self._channel is None:
            if error is not None:
                raise error
            return (RankStage(0, *_fields(part)),)
        account = _account(what, error)
        digest = Record.digest_of(what, "stage")
        packed = _FIGURES.pack(error is not None, digest, *_fields(part)) + account.packed()
        try:
            with interrupts_deferred():
                answers = self._channel.all_gather(packed, timeout, what)
        except GroupError as lost:
            if error is None:
                raise
            if not isinstance(error, Exception):
                raise error from lost
            lost.message += f"; this rank had failed itself: {error}"
            raise lost from error
        if error is not None and not isinstance(error, Exception):
            raise error
        return self._hear(what, error, digest, answers)

    def _hear(
        self, what: str, error: BaseException | None, digest: bytes, answers: list[bytes]
    ) -> tuple[RankStage, ...]:
        assert self._channel is not None
        failures, calls, parts, agreed = {}, {}, [], True
        for rank, answer in zip(self._channel.ranks, answers, strict=True):
            failed, theirs, *fields = _FIGURES.unpack(answer[: _FIGURES.size])
            account = Account.parse(answer[_FIGURES.size :])
            parts.append(RankStage(rank, *fields))
            calls[rank] = account.call(rank)
            agreed = agreed and theirs == digest
            if failed:
                failures[rank] = account.failure(rank)
        if failures:
            _raise_failed(what, len(answers), failures, error)
        if not agreed:
            raise disagreed(calls, {})
        return tuple(parts)


def _raise_failed(
    what: str, size: int, failures: dict[int, RankFailure], error: BaseException | None
) -> NoReturn:
    alike = {(f.kind, f.status, f.tag, f.message) for f in failures.values()}
    if error is not None and len(failures) == size and len(alike) == 1:
        raise error
    reasons: dict[str, list[RankFailure]] = {}
    for failure in failures.values():
        reasons.setdefault(failure.reason, []).append(failure)
    texts = [
        f"{ranks_text(f.rank for f in those)} ({those[0].host}): {reason}"
        for reason, those in reasons.items()
    ]
    raised = RankError(
        f"{what} failed on {ranks_text(failures)} of {size}: {'; '.join(texts)}; what other ranks "
        "did of it stays done, and is left out when it is done again",
        tag=next((f.tag for f in failures.values() if f.tag), ""),
    )
    raised.failures, raised.stuck = failures, {}
    raise raised from error


def _account(what: str, error: BaseException | None) -> Account:
    known = error if isinstance(error, MemsaverError) else None
    return Account(
        socket.gethostname(),
        type(error).__name__ if error is not None else "",
        known.status if known is not None else "",
        known.tag if known is not None else "",
        what,
        "",
        str(error) if error is not None else "",
    )


def _fields(part: Part) -> tuple[float, int, int, int]:
    return part.seconds, part.peak_bytes, part.total_bytes, part.tag_bytes


def _is_initialized() -> bool:
    """Whether torch.distributed is, without importing it."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()
