"""The data of a timeline: transitions, and the memory of tags and devices over time."""

from __future__ import annotations

from dataclasses import dataclass

from memsaver._runtime.native import _C, STATES, State

__all__ = ["DeviceSample", "TagSample", "TagTransition", "Trace", "trace_of"]


@dataclass(frozen=True)
class TagSample:
    """The memory of one tag on one device, from the sample's time until the next sample.

    Experimental: this API can change in any version.

    Attributes:
        seconds: the time of the sample, in seconds since the recording began.
        tag: the tag.
        device: the device's index; -1 for a tag without memory.
        allocated_bytes: the bytes of live allocations, whether resident or not.
        resident_bytes: the bytes of device memory in use.
    """

    seconds: float
    tag: str
    device: int
    allocated_bytes: int
    resident_bytes: int


@dataclass(frozen=True)
class DeviceSample:
    """The free memory of one device at one point in time, as reported by the driver for all
    processes.

    Experimental: this API can change in any version.

    Attributes:
        seconds: the time of the sample, in seconds since the recording began.
        device: the device's index.
        free_bytes: the free bytes of the device.
        total_bytes: the total bytes of the device.
    """

    seconds: float
    device: int
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class TagTransition:
    """The result of one transition for one tag on one device.

    Experimental: this API can change in any version.

    Attributes:
        number: the number of the call, which is the same in the rows of all its tags and devices.
        kind: one of "pause", "resume" and "swap".
        direction: either "out" if the tag was to be paused, or "into" if the tag was to be resumed.
        tag: the tag.
        device: the device's index; -1 for a tag without memory.
        begin_seconds: the start of the transition, in seconds since the recording began; None if
            the transition began before the recording or before `Trace.begin`.
        end_seconds: the end of the transition, in seconds since the recording began; None if the
            transition was in progress at the end of the recording.
        outcome: "done", "failed", "given up" or "under way". A transition that failed raised an
            error. A transition is given up if the caller canceled it before it started. A
            transition is under way if it had not ended when the recording ended.
        device_bytes: device memory released or mapped; 0 unless the outcome is "done".
        copied_bytes: bytes copied to or from the backup; 0 unless the outcome is "done".
        thread: the native id of the thread that began the transition.
        caller: the caller, such as "train.py:120 in sleep, thread 'MainThread'". If the text is
            long, only its end is kept. The text is empty while the transition is in progress.
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
        """The duration, or None if the start or the end is unknown."""
        if self.begin_seconds is None or self.end_seconds is None:
            return None
        return self.end_seconds - self.begin_seconds


@dataclass(frozen=True)
class Trace:
    """A recorded timeline.

    Experimental: this API can change in any version.

    Attributes:
        started: the start of the recording, in seconds since 1970.
        seconds: the length of the recording.
        process: the process's id.
        dropped: the number of old events that newer ones replaced.
        begin: the time from which the recording is complete, in seconds since its start. The value
            is 0, or the time of the oldest remaining event.
        samples: the memory of tags, in chronological order.
        memory: the free device memory, in chronological order.
        transitions: the transitions, in order of their start times.
        clock: the start of the recording, in seconds of the monotonic clock (`time.monotonic`); 0
            if the recording was read from a file that lacks this value.
    """

    started: float
    seconds: float
    process: int
    dropped: int
    begin: float
    samples: tuple[TagSample, ...]
    memory: tuple[DeviceSample, ...]
    transitions: tuple[TagTransition, ...]
    clock: float = 0.0

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags with memory or a transition, in order of appearance."""
        names = [row.tag for row in self.samples if row.allocated_bytes or row.resident_bytes]
        names += [row.tag for row in self.transitions]
        return tuple(dict.fromkeys(names))

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices with samples or with memory of a tag, in ascending order."""
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
    """Build a trace from the core's events.

    Args:
        rows: the rows of `timeline_read`.
        dropped: the number of dropped events of `timeline_read`.
        clock: see `Trace`.
        started: the start in seconds since 1970.
        seconds: the length of the recording.
        process: the process's id.
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
        clock=clock,
    )


def _direction(act: int, state: State, kind: int, outcome: int) -> str:
    """Derive a transition's direction from the tag's state after its start or end."""
    if _KINDS[act] != "swap":
        return "out" if _KINDS[act] == "pause" else "into"
    if kind == _BEGIN:
        return "out" if state == "saving" else "into"
    reached = "out" if state == "paused" else "into"
    if outcome == 0:
        return reached
    return "into" if reached == "out" else "out"
