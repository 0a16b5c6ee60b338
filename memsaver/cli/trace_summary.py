"""Summarize a trace by tag."""

from __future__ import annotations

from dataclasses import dataclass

from memsaver.traces.series import peaks
from memsaver.traces.trace import TagTransition, Trace

__all__ = ["Moves", "TagSummary", "summary"]


@dataclass(frozen=True)
class Moves:
    """The totals of one tag's pauses, or of its resumes, on all devices, including swaps.

    Attributes:
        count: the number of successful transitions.
        failed: the number of failed transitions.
        device_bytes: device memory released or mapped in total.
        copied_bytes: bytes copied to or from the backup in total.
        seconds: the total duration of the successful transitions.
        timed_bytes: the part of `device_bytes` with a known duration.
    """

    count: int
    failed: int
    device_bytes: int
    copied_bytes: int
    seconds: float
    timed_bytes: int

    @property
    def rate(self) -> float:
        """The bytes of device memory per second, or 0 if no duration is known."""
        return self.timed_bytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class TagSummary:
    """The summary of one tag of a trace.

    Attributes:
        tag: the tag.
        peak_bytes: the peak of the tag's total device memory on all devices.
        out: the tag's pauses.
        into: the tag's resumes.
    """

    tag: str
    peak_bytes: int
    out: Moves
    into: Moves


def summary(trace: Trace) -> tuple[TagSummary, ...]:
    """Return a summary of each tag of a trace, in order of appearance."""
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
    took: dict[int, float] = {}  # devices work in parallel
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
