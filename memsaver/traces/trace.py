"""What a timeline recorded: the memory of tags and devices over time, and the transitions."""

from __future__ import annotations

from dataclasses import dataclass

from memsaver.native import _C, STATES, State

__all__ = ["DeviceSample", "TagSample", "TagTransition", "Trace", "trace_of"]


@dataclass(frozen=True)
class TagSample:
    """The memory of one tag on one device, from this moment on.

    Attributes:
        seconds: when, since the recording began.
        tag: the tag.
        device: the device's index; -1 for a tag without memory.
        allocated_bytes: live allocations, resident or not.
        resident_bytes: device memory held.
    """

    seconds: float
    tag: str
    device: int
    allocated_bytes: int
    resident_bytes: int


@dataclass(frozen=True)
class DeviceSample:
    """What the driver said of one device at a moment: all processes' memory.

    Attributes:
        seconds: when, since the recording began.
        device: the device's index.
        free_bytes: bytes free.
        total_bytes: bytes in all.
    """

    seconds: float
    device: int
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class TagTransition:
    """What one transition did to one tag on one device.

    Attributes:
        number: the same for all tags and devices of one call.
        kind: "pause", "resume" or "swap".
        direction: "out" where the tag was to be paused, "into" where it was to be resumed.
        tag: the tag.
        device: the device's index; -1 for a tag without memory.
        begin_seconds: when it took the tag, since the recording began; None: before that, or
            before `Trace.begin`.
        end_seconds: when it was over; None: it was under way when the recording ended.
        outcome: "done", "failed", "given up" (nothing was tried), or "under way".
        device_bytes: device memory given back, or taken; 0 unless done.
        copied_bytes: bytes copied to the backup, or from it; 0 unless done.
        thread: the system's number of the thread that began it.
        caller: who asked, such as "train.py:120 in sleep, thread 'MainThread'", cut at its front
            where it is long; empty while it is under way.
    """

    number: int
    kind: str
    direction: str
    tag: str
    device: int
    begin_seconds: float | None
    end_seconds: float | None
    outcome: str
    device_bytes: int
    copied_bytes: int
    thread: int
    caller: str

    @property
    def seconds(self) -> float | None:
        """How long it took; None where its begin or its end is not known."""
        if self.begin_seconds is None or self.end_seconds is None:
            return None
        return self.end_seconds - self.begin_seconds


@dataclass(frozen=True)
class Trace:
    """A recorded timeline.

    Attributes:
        started: when the recording began, in seconds since 1970.
        seconds: how long it was.
        process: the process's number.
        dropped: how many of its oldest events made place for later ones.
        begin: from when on nothing is missing, in seconds since the recording began: 0, or the time
            of the oldest event that was kept.
        samples: the memory of tags, in the order of time.
        memory: what the driver said, in the order of time.
        transitions: in the order of their begins.
    """

    started: float
    seconds: float
    process: int
    dropped: int
    begin: float
    samples: tuple[TagSample, ...]
    memory: tuple[DeviceSample, ...]
    transitions: tuple[TagTransition, ...]

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that had memory or a transition, in the order in which they appear."""
        names = [row.tag for row in self.samples if row.allocated_bytes or row.resident_bytes]
        names += [row.tag for row in self.transitions]
        return tuple(dict.fromkeys(names))

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices on which a tag has memory, or of which the driver was asked, sorted."""
        found = {row.device for row in self.samples} | {row.device for row in self.memory}
        return tuple(sorted(found - {-1}))


_KINDS = ["", "pause", "resume", "swap"]  # by ms_act
_OUTCOMES = ["done", "failed", "given up"]  # by ms_outcome
_BASELINE, _ALLOCATE, _FREE, _BEGIN, _END, _MEMORY = range(6)  # by ms_event_kind


def trace_of(
    rows: list[_C.TimelineEvent],
    dropped: int,
    *,
    clock: float,
    started: float,
    seconds: float,
    process: int,
) -> Trace:
    """The trace of the core's events.

    Args:
        rows: what `timeline_read` gave.
        dropped: likewise.
        clock: what the monotonic clock said when the recording began.
        started: when that was, in seconds since 1970.
        seconds: how long the recording is.
        process: the process's number.
    """
    samples: list[TagSample] = []
    memory: list[DeviceSample] = []
    spans: dict[tuple[int, str, int], TagTransition] = {}
    rows = sorted(rows, key=lambda row: (row[1] != _BASELINE, row[0]))
    kept = (row[0] - clock for row in rows if row[1] != _BASELINE)
    begin = round(max(next(kept, 0.0), 0.0), 9) if dropped else 0.0
    for row in rows:
        at, kind, device, tag, state, act, outcome, thread, allocated, resident = row[:10]
        number, device_bytes, copied_bytes, free_bytes, total_bytes, caller = row[10:]
        moment = begin if kind == _BASELINE else round(max(at - clock, 0.0), 9)
        if tag is None:
            memory.append(DeviceSample(moment, device, free_bytes, total_bytes))
            continue
        samples.append(TagSample(moment, tag, device, allocated, resident))
        if kind not in (_BEGIN, _END):
            continue
        began = spans.get((number, tag, device))
        begin_seconds = moment if kind == _BEGIN else began.begin_seconds if began else None
        spans[number, tag, device] = TagTransition(
            number=number,
            kind=_KINDS[act],
            direction=began.direction if began else _direction(act, STATES[state], kind, outcome),
            tag=tag,
            device=device,
            begin_seconds=begin_seconds,
            end_seconds=moment if kind == _END else None,
            outcome=_OUTCOMES[outcome] if kind == _END else "under way",
            device_bytes=device_bytes,
            copied_bytes=copied_bytes,
            thread=thread,
            caller=caller,
        )
    return Trace(
        started=started,
        seconds=seconds,
        process=process,
        dropped=dropped,
        begin=begin,
        samples=tuple(samples),
        memory=tuple(memory),
        transitions=tuple(spans.values()),
    )


def _direction(act: int, state: State, kind: int, outcome: int) -> str:
    """Which way a transition moves a tag, by the state after its begin, or after its end."""
    if _KINDS[act] != "swap":
        return "out" if _KINDS[act] == "pause" else "into"
    if kind == _BEGIN:
        return "out" if state is State.SAVING else "into"
    reached = "out" if state is State.PAUSED else "into"
    if outcome == 0:
        return reached
    return "into" if reached == "out" else "out"
