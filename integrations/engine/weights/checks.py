"""The messages with which a sender and an engine's ranks verify weights: request and results.

Requests and results are sent as JSON. `asdict` returns the fields, and `from_fields` checks and
reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import EngineError
from ..fields import Fields, is_whole
from ..messages import Failure, kind_of

__all__ = [
    "RankCheck",
    "VerificationRequest",
    "is_good",
    "raise_failure",
    "unknown_to_all",
]

_REQUEST = "a verification request"


@dataclass(frozen=True)
class VerificationRequest:
    """The checks that an engine's ranks run when they load a bucket.

    Even an empty request detects tensors from which the model loads nothing. It also converts an
    exception in the load, which would otherwise crash the engine, into an answer.

    Attributes:
        names: the names of the bucket's tensors, in order.
        looked_at: the indices in `names` of the tensors to compare: with the sent tensors on
            arrival, and with the model's contents after the load.
        sent: the digests of the compared tensors, one row per rank; a single row applies to all
            ranks.
    """

    names: tuple[str, ...] = ()
    looked_at: tuple[int, ...] = ()
    sent: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> VerificationRequest:
        """Read a request from the result of `asdict`, whose tuples may have become lists.

        Raises `EngineError` for other values.
        """
        read = Fields(fields, _REQUEST)
        names, places, rows = read.texts("names"), read.each("looked_at"), read.each("sent")
        if not all(is_whole(place) and 0 <= place < len(names) for place in places):
            raise EngineError(f"{_REQUEST}: 'looked_at' must be a list of places in 'names'")
        for row in rows:
            digests = row if isinstance(row, list | tuple) else ()
            if len(digests) != len(places) or not all(isinstance(one, str) for one in digests):
                raise EngineError(f"{_REQUEST}: each row of 'sent' must have one digest per place")
        return cls(names, tuple(places), tuple(map(tuple, rows)))

    def check_ranks(self, count: int) -> None:
        """Raise `EngineError` if any of `count` ranks has no digests."""
        if 1 < len(self.sent) < count:
            raise EngineError(
                f"{_REQUEST} is for {len(self.sent)} ranks, and the engine has {count}"
            )

    def digests(self, rank: int) -> dict[str, str]:
        """Return the digests of the tensors sent to a rank, by name."""
        if not self.sent:
            return {}
        row = self.sent[0 if len(self.sent) == 1 else rank]
        return {self.names[at]: digest for at, digest in zip(self.looked_at, row, strict=True)}


@dataclass(frozen=True)
class RankCheck:
    """The result of one rank's checks of a bucket.

    Attributes:
        rank: the rank in its engine (see `Backend.tp_size`).
        host: the name of the rank's host.
        pid: the rank's process id on that host.
        received: the number of compared tensors that arrived unchanged.
        held: the number of compared tensors whose contents equal the model's contents.
        damaged: the tensors that arrived with different contents; if there are any, the bucket was
            not loaded.
        differing: the tensors whose contents differ from the model's contents.
        unused: the tensors from which nothing was written to the model's memory, because the model
            does not use the name or because no part of the tensor belongs to this rank.
        unverified: the reason why the model's contents could not be compared, or "".
        failure: the failure of the load, or None; after a failure, a part of the bucket may have
            been loaded.
        engine: the name of the rank's engine if the caller updates several engines, otherwise "".
    """

    rank: int
    host: str
    pid: int
    received: int = 0
    held: int = 0
    damaged: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    unverified: str = ""
    failure: Failure | None = None
    engine: str = ""

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> RankCheck:
        """Read a check from the result of `asdict`, whose tuples may have become lists.

        Raises `EngineError` for other values.
        """
        read = Fields(fields, "a rank's check")
        return cls(
            read.whole("rank"),
            read.text("host"),
            read.whole("pid"),
            read.whole("received", 0),
            read.whole("held", 0),
            read.texts("damaged"),
            read.texts("differing"),
            read.texts("unused"),
            read.text("unverified", ""),
            Failure.from_fields(read.optional("failure")),
        )

    @property
    def place(self) -> str:
        """The rank, its host and, if known, its engine's name, for messages."""
        return f"rank {self.rank} ({', '.join(filter(None, (self.host, self.engine)))})"


def unknown_to_all(checks: Sequence[RankCheck]) -> set[str]:
    """Return the names of the tensors from which no rank loaded anything."""
    return set.intersection(*(set(check.unused) for check in checks)) if checks else set()


def is_good(checks: Sequence[RankCheck]) -> bool:
    """Return whether the checks found no defect, so that the update counts as successful."""
    return not unknown_to_all(checks) and not any(
        check.failure or check.damaged or check.differing for check in checks
    )


def raise_failure(checks: Sequence[RankCheck]) -> None:
    """Raise the error of the first rank whose load failed, as an instance of the error's class."""
    for check in checks:
        if check.failure is not None:
            raise kind_of(check.failure)(
                f"the load failed on {check.place}: {check.failure.message}",
                tag=check.failure.tag,
            )
