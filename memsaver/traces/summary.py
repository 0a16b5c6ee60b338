"""What a trace comes to, tag by tag."""

from __future__ import annotations

from dataclasses import dataclass

from memsaver.traces.series import peaks
from memsaver.traces.trace import TagTransition, Trace

__all__ = ["Moves", "TagSummary", "summary"]


@dataclass(frozen=True)
class Moves:
    """The pauses, or the resumes, of one tag, swaps among them; on all devices.

    Attributes:
        count: how many were done.
        failed: how many failed.
        device_bytes: device memory given back, or taken, in all.
        copied_bytes: bytes copied to the backup, or from it, in all.
        seconds: how long those that were done took, in sum.
        timed_bytes: the part of `device_bytes` whose time is known.
    """

    count: int
    failed: int
    device_bytes: int
    copied_bytes: int
    seconds: float
    timed_bytes: int

    @property
    def rate(self) -> float:
        """Device memory per second, bytes; 0 where no time is known."""
        return self.timed_bytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class TagSummary:
    """One tag of a trace.

    Attributes:
        tag: the tag.
        peak_bytes: the most device memory that it held at one time, on all devices together.
        out: its pauses.
        into: its resumes.
    """

    tag: str
    peak_bytes: int
    out: Moves
    into: Moves


def summary(trace: Trace) -> tuple[TagSummary, ...]:
    """The tags of a trace, in the order in which they appear."""
    highest = peaks(trace)
    rows: dict[tuple[str, str], list[TagTransition]] = {}
    for row in trace.transitions:
        rows.setdefault((row.tag, row.direction), []).append(row)
    return tuple(
        TagSummary(
            tag,
            highest.get(tag, 0),
            _moves(rows.get((tag, "out"), [])),
            _moves(rows.get((tag, "into"), [])),
        )
        for tag in trace.tags
    )


def _moves(rows: list[TagTransition]) -> Moves:
    done = [row for row in rows if row.outcome == "done"]
    took: dict[int, float] = {}  # devices work side by side
    for row in done:
        if row.seconds is not None:
            took[row.number] = max(took.get(row.number, 0.0), row.seconds)
    return Moves(
        count=len({row.number for row in done}),
        failed=len({row.number for row in rows if row.outcome == "failed"}),
        device_bytes=sum(row.device_bytes for row in done),
        copied_bytes=sum(row.copied_bytes for row in done),
        seconds=sum(took.values()),
        timed_bytes=sum(row.device_bytes for row in done if row.number in took),
    )
