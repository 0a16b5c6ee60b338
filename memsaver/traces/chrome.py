"""Read and write traces in Chrome's trace format, for Perfetto (ui.perfetto.dev) and
chrome://tracing.

Each tag on each device has a track with its transitions, and counters for its memory. Each device
has a counter for its free memory, as reported by the driver. Times are in microseconds since the
start of the recording.
"""

from __future__ import annotations

import json
import math
from typing import Any

from memsaver.errors import ConfigError
from memsaver.traces.trace import DeviceSample, TagSample, TagTransition, Trace

__all__ = ["read_json", "to_json"]

_FORMAT = 1
_CATEGORY = "memsaver"


def to_json(trace: Trace) -> str:
    """Return the trace as the text of a file."""
    document = {
        "traceEvents": [*_names(trace), *_spans(trace), *_counters(trace)],
        "displayTimeUnit": "ms",
        "otherData": {
            "memsaver_trace": _FORMAT,
            "started": trace.started,
            "seconds": trace.seconds,
            "process": trace.process,
            "dropped": trace.dropped,
            "begin": trace.begin,
            "clock": trace.clock,
        },
    }
    return json.dumps(document, separators=(",", ":"))


def read_json(text: str | bytes) -> Trace:
    """Return the trace from text that `to_json` returned.

    Raises:
        ConfigError: the text is not a memsaver trace, or is damaged.
    """
    try:
        document = json.loads(text)
        about = document["otherData"]
        version = about["memsaver_trace"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(
            "this is not a memsaver trace: create one with `with memsaver.timeline() as t: ...`, "
            "then t.save('trace.json')"
        ) from None
    if version != _FORMAT:
        raise ConfigError(
            f"the trace has format {version!r}, and this version of memsaver reads format "
            f"{_FORMAT}: read it with the version that wrote it"
        )
    try:
        return _trace(document["traceEvents"], about)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(f"the trace is damaged: {error!r}") from None


# --- written


def _place(tag: str, device: int) -> str:
    return tag if device < 0 else f"{tag}, GPU {device}"


def _tracks(trace: Trace) -> dict[tuple[str, int], int]:
    """Assign a number to the track of each tag and device, in order of appearance."""
    places = [(row.tag, row.device) for row in trace.samples]
    places += [(row.tag, row.device) for row in trace.transitions]
    return {place: index + 1 for index, place in enumerate(dict.fromkeys(places))}


def _names(trace: Trace) -> list[dict[str, Any]]:
    named: list[tuple[str, int, dict[str, Any]]] = [("process_name", 0, {"name": "memsaver"})]
    for (tag, device), track in _tracks(trace).items():
        named.append(("thread_name", track, {"name": _place(tag, device)}))
        named.append(("thread_sort_index", track, {"sort_index": track}))
    return [
        {"ph": "M", "name": name, "pid": trace.process, "tid": track, "args": args}
        for name, track, args in named
    ]


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _spans(trace: Trace) -> list[dict[str, Any]]:
    tracks = _tracks(trace)
    events = []
    for row in trace.transitions:
        begin = row.begin_seconds if row.begin_seconds is not None else trace.begin
        event: dict[str, Any] = {
            "ph": "B" if row.end_seconds is None else "X",
            "cat": _CATEGORY,
            "name": row.kind if row.outcome == "done" else f"{row.kind} ({row.outcome})",
            "pid": trace.process,
            "tid": tracks[row.tag, row.device],
            "ts": _microseconds(begin),
        }
        if row.end_seconds is not None:
            event["dur"] = round(_microseconds(row.end_seconds) - event["ts"], 3)
        event["args"] = {
            "tag": row.tag,
            "device": row.device,
            "kind": row.kind,
            "direction": row.direction,
            "outcome": row.outcome,
            "device_bytes": row.device_bytes,
            "copied_bytes": row.copied_bytes,
            "caller": row.caller,
            "thread": row.thread,
            "transition": row.number,
            "begin_known": row.begin_seconds is not None,
        }
        events.append(event)
    return events


def _counters(trace: Trace) -> list[dict[str, Any]]:
    def counter(seconds: float, name: str, series: str, value: int, about: Any) -> dict[str, Any]:
        return {
            "ph": "C",
            "cat": _CATEGORY,
            "name": name,
            "pid": trace.process,
            "ts": _microseconds(seconds),
            "args": {series: value},
            "memsaver": about,
        }

    events = []
    allocated: dict[str, int] = {}
    for row in trace.samples:
        place = _place(row.tag, row.device)
        about = {"tag": row.tag, "device": row.device, "allocated_bytes": row.allocated_bytes}
        events.append(
            counter(row.seconds, f"{place}: resident", "bytes", row.resident_bytes, about)
        )
        if allocated.get(place) != row.allocated_bytes:
            allocated[place] = row.allocated_bytes
            events.append(
                counter(row.seconds, f"{place}: allocated", "bytes", row.allocated_bytes, None)
            )
    for free in trace.memory:
        about = {"device": free.device, "total_bytes": free.total_bytes}
        events.append(
            counter(free.seconds, f"GPU {free.device}: free", "bytes", free.free_bytes, about)
        )
    return sorted(events, key=lambda event: float(event["ts"]))


# --- read


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"a time must be a finite number, not {value!r}")
    return value


def _seconds(microseconds: object) -> float:
    return round(_number(microseconds) / 1e6, 9)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"a number of bytes must be an integer, not {value!r}")
    return value


def _text(value: object, known: tuple[str, ...] = ()) -> str:
    if not isinstance(value, str) or (known and value not in known):
        raise ValueError(f"{value!r} is not expected here")
    return value


def _trace(events: list[dict[str, Any]], about: dict[str, Any]) -> Trace:
    samples: list[TagSample] = []
    memory: list[DeviceSample] = []
    transitions: list[TagTransition] = []
    for event in events:
        if event.get("cat") != _CATEGORY:
            continue
        if event["ph"] == "C":
            _read_counter(event, samples, memory)
        else:
            transitions.append(_read_span(event))
    return Trace(
        started=_number(about["started"]),
        seconds=_number(about["seconds"]),
        process=_count(about["process"]),
        dropped=_count(about["dropped"]),
        begin=_number(about["begin"]),
        samples=tuple(samples),
        memory=tuple(memory),
        transitions=tuple(transitions),
        clock=_number(about.get("clock", 0.0)),
    )


def _read_counter(
    event: dict[str, Any], samples: list[TagSample], memory: list[DeviceSample]
) -> None:
    about = event["memsaver"]
    if about is None:
        return  # another counter contains these bytes
    seconds, value = _seconds(event["ts"]), _count(event["args"]["bytes"])
    device = _count(about["device"])
    if "tag" in about:
        allocated = _count(about["allocated_bytes"])
        samples.append(TagSample(seconds, _text(about["tag"]), device, allocated, value))
    else:
        memory.append(DeviceSample(seconds, device, value, _count(about["total_bytes"])))


def _read_span(event: dict[str, Any]) -> TagTransition:
    args = event["args"]
    begin = _seconds(event["ts"])
    return TagTransition(
        number=_count(args["transition"]),
        kind=_text(args["kind"], ("pause", "resume", "swap")),
        direction=_text(args["direction"], ("out", "into")),
        tag=_text(args["tag"]),
        device=_count(args["device"]),
        begin_seconds=begin if args["begin_known"] else None,
        end_seconds=None if event["ph"] == "B" else _seconds(event["ts"] + event["dur"]),
        outcome=_text(args["outcome"], ("done", "failed", "given up", "under way")),
        device_bytes=_count(args["device_bytes"]),
        copied_bytes=_count(args["copied_bytes"]),
        thread=_count(args["thread"]),
        caller=_text(args["caller"]),
    )
