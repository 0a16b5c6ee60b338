"""What an engine's schedulers tell about their memory: tags, and answers to release and resume.

Schedulers and callers are different processes, on different hosts maybe, so that all of it goes
through JSON. SGLang's answers to a release or a resume have no field for a result; what they do
have is `rid`, a string that nothing reads there, which carries an `Answer` as text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from memsaver import errors
from memsaver.errors import ConfigError, InvalidStateError, MemsaverError
from memsaver.integrations.sglang.errors import EngineBusyError, EngineError

__all__ = [
    "GRAPH",
    "KV_CACHE",
    "RELEASE_ORDER",
    "RESUME_ORDER",
    "WEIGHTS",
    "Answer",
    "Failure",
    "RankReport",
    "SchedulerState",
    "answers_of",
    "error_of",
    "kind_of",
]

KV_CACHE, WEIGHTS, GRAPH = "kv_cache", "weights", "cuda_graph"

# SGLang's own orders, whatever order is asked for.
RELEASE_ORDER = (KV_CACHE, WEIGHTS, GRAPH)
RESUME_ORDER = (GRAPH, WEIGHTS, KV_CACHE)

_PREFIX = "memsaver:"

# What may travel by name. A kind that is not here arrives as an EngineError.
_KINDS: dict[str, type[MemsaverError]] = {
    kind.__name__: kind
    for kind in (
        errors.BackupError,
        ConfigError,
        errors.DriverError,
        EngineBusyError,
        InvalidStateError,
        errors.OutOfDeviceMemoryError,
        errors.OutOfHostMemoryError,
        errors.UnknownTagError,
    )
}


# Those of them that say how much was wanted.
_WANTS = (errors.BackupError, errors.OutOfDeviceMemoryError, errors.OutOfHostMemoryError)


@dataclass(frozen=True)
class Failure:
    """An exception, as far as it travels.

    Attributes:
        kind: the exception's class.
        message: its text.
        tag: the tag concerned, or "".
        needed: bytes that were needed, where it is a want of memory or disk.
        free: bytes that were free, likewise.
    """

    kind: str
    message: str
    tag: str = ""
    needed: int = 0
    free: int = 0

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """What travels of an exception."""
        return cls(
            type(error).__name__,
            str(error) or type(error).__name__,
            getattr(error, "tag", ""),
            getattr(error, "needed", 0),
            getattr(error, "free", 0),
        )


@dataclass(frozen=True)
class RankReport:
    """What a release or a resume did on one rank.

    Attributes:
        rank: the rank in its tensor-parallel group.
        host: the name of its host.
        pid: its process there.
        seconds: how long giving the memory back, or taking it, took there.
        device_bytes: device memory given back, or taken, by tag.
        copied_bytes: bytes moved to the backup, or from it, by tag.
        failure: what went wrong there, or None.
    """

    rank: int
    host: str
    pid: int
    seconds: float = 0.0
    device_bytes: Mapping[str, int] = field(default_factory=dict)
    copied_bytes: Mapping[str, int] = field(default_factory=dict)
    failure: Failure | None = None

    @property
    def bytes(self) -> int:
        """Device memory given back, or taken, in total."""
        return sum(self.device_bytes.values())

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> RankReport:
        """The report whose `asdict` this is."""
        failure = fields["failure"]
        return cls(**{**fields, "failure": Failure(**failure) if failure else None})


@dataclass(frozen=True)
class Answer:
    """What one scheduler says of a release or a resume, for all ranks of its group.

    Attributes:
        scheduler: its name, which no other has.
        operation: "release" or "resume".
        tags: what it was done to, or was to be done to; what was as asked already is left out.
        released: the tags whose memory is given back now.
        held: those of them of which some rank has memory still, as it could not give it back after
            a failure; a release of them tries again.
        ranks: the ranks of the scheduler's tensor-parallel group.
        failure: why it was not done, or None.
        number: counts the scheduler's answers, from 1.
    """

    scheduler: str
    operation: str
    tags: tuple[str, ...]
    released: tuple[str, ...]
    held: tuple[str, ...] = ()
    ranks: tuple[RankReport, ...] = ()
    failure: Failure | None = None
    number: int = 0

    def text(self) -> str:
        """The answer as a string, which `answers_of` understands."""
        return _PREFIX + json.dumps(asdict(self))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Answer:
        """The answer whose `asdict` this is, lists in place of tuples or not."""
        failure = fields["failure"]
        return cls(
            fields["scheduler"],
            fields["operation"],
            tuple(fields["tags"]),
            tuple(fields["released"]),
            tuple(fields["held"]),
            tuple(RankReport.from_fields(rank) for rank in fields["ranks"]),
            Failure(**failure) if failure else None,
            fields["number"],
        )


@dataclass(frozen=True)
class SchedulerState:
    """How one scheduler is, as part of the server information.

    Attributes:
        scheduler: its name, which no other has.
        released: the tags whose memory is given back.
        idle: whether a release would find nothing in flight.
        last: the last answer, or None.
    """

    scheduler: str
    released: tuple[str, ...]
    idle: bool
    last: Answer | None = None

    def fields(self) -> dict[str, Any]:
        """The state as what JSON can say."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> SchedulerState:
        """The state whose `fields` these are."""
        last = fields["last"]
        return cls(
            fields["scheduler"],
            tuple(fields["released"]),
            fields["idle"],
            Answer.from_fields(last) if last else None,
        )

    @property
    def held(self) -> tuple[str, ...]:
        """As of `Answer`."""
        return self.last.held if self.last is not None else ()


def answers_of(outputs: Iterable[object]) -> list[Answer]:
    """The answers in SGLang's outputs; none of those of a scheduler without memsaver's hooks."""
    texts = [getattr(output, "rid", None) or "" for output in outputs]
    return [
        Answer.from_fields(json.loads(text[len(_PREFIX) :]))
        for text in texts
        if text.startswith(_PREFIX)
    ]


def error_of(answers: Iterable[Answer]) -> MemsaverError | None:
    """The typed error of the first answer that has one."""
    for answer in answers:
        failure = answer.failure
        if failure is None:
            continue
        error = kind_of(failure)(failure.message, tag=failure.tag)
        if isinstance(error, _WANTS):
            error.needed, error.free = failure.needed, failure.free
        return error
    return None


def kind_of(failure: Failure) -> type[MemsaverError]:
    """The class of a failure's exception, as far as it travels by name."""
    kind: type[MemsaverError] = _KINDS.get(failure.kind, EngineError)
    return kind
