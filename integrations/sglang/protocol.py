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
from memsaver.integrations.sglang.fields import Fields, is_whole, parsed

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
    "states_of",
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
    """The parts of an exception that are sent.

    Attributes:
        kind: the exception's class.
        message: its text.
        tag: the tag concerned, or "".
        needed: bytes that were needed, if memory or disk space was short.
        free: bytes that were free, if memory or disk space was short.
    """

    kind: str
    message: str
    tag: str = ""
    needed: int = 0
    free: int = 0

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """What travels of an exception."""
        # In exceptions other than memsaver's, attributes with these names may be anything.
        tag: Any = getattr(error, "tag", "")
        needed: Any = getattr(error, "needed", 0)
        free: Any = getattr(error, "free", 0)
        return cls(
            type(error).__name__,
            str(error) or type(error).__name__,
            tag if isinstance(tag, str) else "",
            needed if is_whole(needed) else 0,
            free if is_whole(free) else 0,
        )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any] | None) -> Failure | None:
        """Make the failure from its `asdict`; None for None. Raises `EngineError` otherwise."""
        if fields is None:
            return None
        read = Fields(fields, "a failure")
        return cls(
            read.text("kind"),
            read.text("message"),
            read.text("tag", ""),
            read.whole("needed", 0),
            read.whole("free", 0),
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
        """Make the report from its `asdict`. Raises `EngineError` for anything else."""
        read = Fields(fields, "a rank's report")
        return cls(
            read.whole("rank"),
            read.text("host"),
            read.whole("pid"),
            read.number("seconds", 0.0),
            read.wholes("device_bytes"),
            read.wholes("copied_bytes"),
            Failure.from_fields(read.optional("failure")),
        )


@dataclass(frozen=True)
class Answer:
    """One scheduler's answer to a release or a resume, for all ranks of its group.

    Attributes:
        scheduler: its name, which no other has.
        operation: "release" or "resume".
        tags: the tags of the operation, done or not, without those that already were as requested.
        released: the tags whose memory is released now.
        held: the released tags of which some rank still has memory, because it could not release
            it after a failure; the next release of them tries again.
        ranks: the ranks of the scheduler's tensor-parallel group.
        failure: why it was not done, or None.
        number: counts the scheduler's answers, from 1.
        lost: tags that a failed release mapped again, in which contents without a backup are lost.
    """

    scheduler: str
    operation: str
    tags: tuple[str, ...]
    released: tuple[str, ...]
    held: tuple[str, ...] = ()
    ranks: tuple[RankReport, ...] = ()
    failure: Failure | None = None
    number: int = 0
    lost: tuple[str, ...] = ()

    def text(self) -> str:
        """The answer as a string, which `answers_of` understands."""
        return _PREFIX + json.dumps(asdict(self))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Answer:
        """Make the answer from its `asdict`, whose tuples may have become lists.

        Raises `EngineError` for anything else.
        """
        read = Fields(fields, "a scheduler's answer")
        return cls(
            read.text("scheduler"),
            read.text("operation"),
            read.texts("tags"),
            read.texts("released", RELEASE_ORDER),
            read.texts("held", RELEASE_ORDER),
            tuple(RankReport.from_fields(rank) for rank in read.each("ranks")),
            Failure.from_fields(read.optional("failure")),
            read.whole("number"),
            read.texts("lost", RELEASE_ORDER),
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
        """Make the state from its `fields`. Raises `EngineError` for anything else."""
        read = Fields(fields, "a scheduler's state")
        last = read.optional("last")
        return cls(
            read.text("scheduler"),
            read.texts("released", RELEASE_ORDER),
            read.flag("idle"),
            None if last is None else Answer.from_fields(last),
        )

    @property
    def held(self) -> tuple[str, ...]:
        """The last answer's `held`. See `Answer`."""
        return self.last.held if self.last is not None else ()


def states_of(internal_states: object) -> list[SchedulerState]:
    """Read the schedulers' states from SGLang's `internal_states`.

    Returns:
        The states; [] if a scheduler lacks memsaver's hooks.

    Raises:
        EngineError: `internal_states` is not a list of objects, or a state is invalid.
    """
    if not isinstance(internal_states, list | tuple):
        raise EngineError(
            f"an engine's internal states must be a list, not {type(internal_states).__name__}"
        )
    states = [Fields(state, "an internal state").optional("memsaver") for state in internal_states]
    if any(state is None for state in states):
        return []
    return [SchedulerState.from_fields(state) for state in states]


def answers_of(outputs: Iterable[object]) -> list[Answer]:
    """Return the answers in SGLang's outputs, which only schedulers with memsaver's hooks send.

    Raises:
        EngineError: an answer is invalid.
    """
    texts = [getattr(output, "rid", None) for output in outputs]
    return [
        Answer.from_fields(parsed(text[len(_PREFIX) :], "a scheduler's answer"))
        for text in texts
        if isinstance(text, str) and text.startswith(_PREFIX)
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
