"""What a sender of weights and an engine's ranks tell each other: what to check, and what was seen.

An `Order` travels in `rid` of SGLang's request for an update, which nothing reads there and which
reaches every rank of a tensor-parallel group. What the ranks found comes back as the message of
SGLang's answer, which is all that the tokenizer manager passes on, to a caller in its process as to
one over HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from memsaver.integrations.sglang.errors import EngineError
from memsaver.integrations.sglang.fields import Fields, is_whole, parsed
from memsaver.integrations.sglang.protocol import Failure, kind_of

__all__ = ["Order", "RankCheck", "answer_text", "checks_of", "is_good", "unknown_to_all"]

_PREFIX = "memsaver:"
_ORDER = "an order of checks"


@dataclass(frozen=True)
class Order:
    """What an engine's ranks are to check when they load a bucket.

    Whatever it asks for, tensors that the model takes nothing of are found, and what fails in a
    load is an answer and not the engine's end.

    Attributes:
        names: the bucket's tensors, in their order.
        looked_at: which of them are compared with what was sent, by their place in `names`; and
            with what the model holds after the load.
        sent: their digests, in that order, for each rank; a single row is for all ranks.
    """

    names: tuple[str, ...] = ()
    looked_at: tuple[int, ...] = ()
    sent: tuple[tuple[str, ...], ...] = ()

    def text(self) -> str:
        """The order as a string, for `from_text`."""
        return _PREFIX + json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str | None) -> Order | None:
        """The order whose `text` this is; None where it is no order.

        Raises `EngineError` for a text that begins as an order and is not one.
        """
        if not text or not text.startswith(_PREFIX):
            return None
        read = Fields(parsed(text[len(_PREFIX) :], _ORDER), _ORDER)
        names, places, rows = read.texts("names"), read.each("looked_at"), read.each("sent")
        if not all(is_whole(place) and 0 <= place < len(names) for place in places):
            raise EngineError(f"{_ORDER}: 'looked_at' is a list of places in 'names'")
        for row in rows:
            digests = row if isinstance(row, list | tuple) else ()
            if len(digests) != len(places) or not all(isinstance(one, str) for one in digests):
                raise EngineError(f"{_ORDER}: 'sent' is a list of a digest for each place")
        return cls(names, tuple(places), tuple(map(tuple, rows)))

    def check_ranks(self, count: int) -> None:
        """Raise `EngineError` if it has no digests for some of `count` ranks."""
        if 1 < len(self.sent) < count:
            raise EngineError(f"{_ORDER} is for {len(self.sent)} ranks, and the engine has {count}")

    def digests(self, rank: int) -> dict[str, str]:
        """The digests of what was sent to a rank, by the name of the tensor."""
        if not self.sent:
            return {}
        row = self.sent[0 if len(self.sent) == 1 else rank]
        return {self.names[at]: digest for at, digest in zip(self.looked_at, row, strict=True)}


@dataclass(frozen=True)
class RankCheck:
    """What one rank of an engine found when it loaded a bucket.

    Attributes:
        rank: the rank in its tensor-parallel group.
        host: the name of its host.
        pid: its process there.
        received: how many tensors came as they were sent.
        held: of how many the model holds what was sent.
        damaged: tensors that came otherwise than they were sent. The bucket was not loaded then.
        differing: tensors of which the model holds something else.
        unused: tensors of which nothing was written to the model's memory: it does not know the
            name, or has no part of it on this rank.
        unverified: why `held` could not be found out, or "".
        failure: what went wrong, or None. Some of the bucket may have been loaded.
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

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> RankCheck:
        """The check whose `asdict` this is, lists in place of tuples or not.

        Raises `EngineError` for anything else.
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


def unknown_to_all(checks: Sequence[RankCheck]) -> set[str]:
    """The names that none of the ranks took anything of."""
    return set.intersection(*(set(check.unused) for check in checks)) if checks else set()


def is_good(checks: Sequence[RankCheck]) -> bool:
    """Whether the bucket is where it belongs, as far as it was looked at: then it was done."""
    return not unknown_to_all(checks) and not any(
        check.failure or check.damaged or check.differing for check in checks
    )


def answer_text(checks: Sequence[RankCheck]) -> str:
    """The checks of a scheduler's ranks as a string, for `checks_of`."""
    return _PREFIX + json.dumps([asdict(check) for check in checks])


def checks_of(done: bool, message: str) -> list[RankCheck]:
    """What the ranks of all schedulers found, out of the engine's answer to an update.

    Args:
        done: whether the engine says that it was done.
        message: what else it says; text around the answers does not matter.

    Returns:
        The checks, [] where the engine has not memsaver's plugin, and did the update.

    Raises:
        EngineError: the update failed, or memsaver's own error of the rank where it did.
    """
    checks = list(_checks_in(message))
    for check in checks:
        if check.failure is not None:
            text = f"the load failed on rank {check.rank} ({check.host}): {check.failure.message}"
            raise kind_of(check.failure)(text, tag=check.failure.tag)
    if not done and is_good(checks):
        raise EngineError(f"the engine did not load the weights: {message}")
    return checks


def _checks_in(message: str) -> Iterator[RankCheck]:
    decoder = json.JSONDecoder()
    at = message.find(_PREFIX)
    while at >= 0:
        try:
            rows, end = decoder.raw_decode(message, at + len(_PREFIX))
        except (ValueError, RecursionError) as error:
            raise EngineError(f"the engine's answer was cut: {message[at:][:200]!r}") from error
        if not isinstance(rows, list):
            raise EngineError(f"the checks of an engine's ranks are no {type(rows).__name__}")
        yield from (RankCheck.from_fields(row) for row in rows)
        at = message.find(_PREFIX, end)
