"""Messages of an engine's scheduler processes about their memory.

Schedulers and callers are different processes, possibly on different hosts, so the messages are
sent as JSON. `asdict` returns a message's fields, and the class's `from_fields` checks and reads
them. Each engine's integration decides how to send the JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memsaver import errors
from memsaver.distributed.messages import text_of
from memsaver.errors import ConfigError, InvalidStateError, MemsaverError

from .errors import EngineAsleepError, EngineBusyError, EngineError
from .fields import Fields, is_whole
from .tags import RELEASE_ORDER

__all__ = [
    "Answer",
    "Failure",
    "RankReport",
    "SchedulerState",
    "error_of",
    "kind_of",
    "raisable",
]

# The exceptions that are sent by name. Any other exception arrives as an EngineError.
_KINDS: dict[str, type[MemsaverError]] = {
    kind.__name__: kind
    for kind in (
        errors.BackupError,
        ConfigError,
        errors.DriverError,
        EngineAsleepError,
        EngineBusyError,
        InvalidStateError,
        errors.OutOfDeviceMemoryError,
        errors.OutOfHostMemoryError,
        errors.SharingError,
        errors.UnknownTagError,
    )
}

# The exceptions with attributes for the needed and the free bytes.
_WANTS = (errors.BackupError, errors.OutOfDeviceMemoryError, errors.OutOfHostMemoryError)


@dataclass(frozen=True)
class Failure:
    """The parts of an exception that are sent to another process.

    Attributes:
        kind: the name of the exception's class.
        message: the exception's text.
        tag: the affected tag, or "".
        needed: the required bytes, if memory or disk space was insufficient.
        free: the free bytes, if memory or disk space was insufficient.
    """

    kind: str
    message: str
    tag: str = ""
    needed: int = 0
    free: int = 0

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the parts of an exception that are sent to another process."""
        # On exceptions other than memsaver's, attributes with these names may have any value.
        tag: Any = getattr(error, "tag", "")
        needed: Any = getattr(error, "needed", 0)
        free: Any = getattr(error, "free", 0)
        return cls(
            type(error).__name__,
            text_of(error),
            tag if isinstance(tag, str) else "",
            needed if is_whole(needed) else 0,
            free if is_whole(free) else 0,
        )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any] | None) -> Failure | None:
        """Read a failure from the result of `asdict`; None yields None.

        Raises `EngineError` for other values.
        """
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
    """The report of a release or a resume on one rank.

    Attributes:
        rank: the rank among the answer's ranks.
        host: the name of the rank's host.
        pid: the rank's process id on that host.
        seconds: the duration of the release or resume on this rank.
        device_bytes: device memory released or mapped, by tag.
        copied_bytes: bytes copied to or from the backup, by tag.
        failure: the rank's failure, or None.
        held: the bytes that remain in use on the rank's device after a release of all memory, by
            owner (see the module `held`); empty after any other operation.
    """

    rank: int
    host: str
    pid: int
    seconds: float = 0.0
    device_bytes: Mapping[str, int] = field(default_factory=dict)
    copied_bytes: Mapping[str, int] = field(default_factory=dict)
    failure: Failure | None = None
    held: Mapping[str, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The total device memory that was released or mapped."""
        return sum(self.device_bytes.values())

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> RankReport:
        """Read a report from the result of `asdict`. Raises `EngineError` for other values."""
        read = Fields(fields, "a rank's report")
        return cls(
            read.whole("rank"),
            read.text("host"),
            read.whole("pid"),
            read.number("seconds", 0.0),
            read.wholes("device_bytes"),
            read.wholes("copied_bytes"),
            Failure.from_fields(read.optional("failure")),
            read.wholes("held"),
        )


@dataclass(frozen=True)
class Answer:
    """A scheduler's answer to a release or a resume, for all ranks of its group.

    Attributes:
        scheduler: the scheduler's unique name.
        operation: either "release" or "resume".
        tags: the operation's tags, even if it failed, except those that were already in the
            requested state.
        released: the tags whose memory is currently released.
        held: the released tags that still have memory, because a rank could not release it after a
            failure; the next release tries again.
        ranks: the reports of the ranks that release and resume together: the ranks of the
            scheduler's tensor-parallel group or, in a pipeline, of all stages.
        failure: the operation's failure, or None.
        number: the answer's sequence number, which starts at 1 for each scheduler.
        lost: tags whose contents are lost. If a release fails, the tags are mapped again, but
            contents without a backup are lost. A failed resume releases the tags again, but loses
            contents that were about to be overwritten.
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

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Answer:
        """Read an answer from the result of `asdict`, whose tuples may have become lists.

        Raises `EngineError` for other values.
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
    """The state of one scheduler's memory.

    Attributes:
        scheduler: the scheduler's unique name.
        released: the tags whose memory is released.
        idle: whether no request is in flight, so that memory can be released.
        last: the scheduler's last answer, or None.
        when_asleep: the treatment of requests that need released memory; see `Policy`.
        update_ranks: the number of ranks that receive their own tensors in a weight update; 0 if
            unknown.
        domain: the name of the domain whose shareable regions the scheduler's ranks can map; "" if
            unknown.
        lost: the tags whose contents are lost or have not been completely reloaded, even if the
            tags are mapped.
    """

    scheduler: str
    released: tuple[str, ...]
    idle: bool
    last: Answer | None = None
    when_asleep: str = "refuse"
    update_ranks: int = 0
    domain: str = ""
    lost: tuple[str, ...] = ()

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> SchedulerState:
        """Read a state from the result of `asdict`. Raises `EngineError` for other values."""
        read = Fields(fields, "a scheduler's state")
        last = read.optional("last")
        return cls(
            read.text("scheduler"),
            read.texts("released", RELEASE_ORDER),
            read.flag("idle"),
            None if last is None else Answer.from_fields(last),
            read.text("when_asleep", "refuse"),
            read.whole("update_ranks", 0),
            read.text("domain", ""),
            read.texts("lost", RELEASE_ORDER),
        )

    @property
    def held(self) -> tuple[str, ...]:
        """The last answer's `held`. See `Answer`."""
        return self.last.held if self.last is not None else ()


def error_of(answers: Iterable[Answer]) -> MemsaverError | None:
    """Return the typed error of the first answer with a failure; None if all succeeded."""
    return next((raisable(one.failure) for one in answers if one.failure is not None), None)


def raisable(failure: Failure) -> MemsaverError:
    """Return the typed error that a failure describes."""
    error = kind_of(failure)(failure.message, tag=failure.tag)
    if isinstance(error, _WANTS):
        error.needed, error.free = failure.needed, failure.free
    return error


def kind_of(failure: Failure) -> type[MemsaverError]:
    """Return the exception class that a failure names; `EngineError` if the name is unknown.

    torch's `OutOfMemoryError` becomes an `OutOfDeviceMemoryError`. Other libraries have exceptions
    with the same name, which report a shortage of host memory.
    """
    if failure.kind == "OutOfMemoryError" and "CUDA out of memory" in failure.message:
        return errors.OutOfDeviceMemoryError
    return _KINDS.get(failure.kind, EngineError)
