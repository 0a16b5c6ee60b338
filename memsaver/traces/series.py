"""A trace's memory as lines over common points in time: what charts are drawn from."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from memsaver.traces.trace import Trace

__all__ = ["DeviceSeries", "device_series", "peaks"]


@dataclass(frozen=True)
class DeviceSeries:
    """One device's memory over time: each value counts from its time to the next.

    Attributes:
        device: the device's index.
        seconds: the times, rising, from the trace's begin to its end.
        resident: of each of its tags, the device memory that it holds at these times, bytes.
        allocated: of each tag, its live allocations.
        free: what the driver had free, by the last time it was asked; None before the first.
        total_bytes: all of the device's memory; 0 where the driver was not asked.
    """

    device: int
    seconds: list[float]
    resident: dict[str, list[int]]
    allocated: dict[str, list[int]]
    free: list[int | None]
    total_bytes: int


def device_series(trace: Trace, device: int, most: int = 20_000) -> DeviceSeries:
    """One device's memory over time, thinned out to about `most` points.

    Thinning keeps the least and the greatest sum of each stretch, so no peak is lost.
    """
    samples = [row for row in trace.samples if row.device == device]
    asked = [row for row in trace.memory if row.device == device]
    times = {row.seconds for row in samples} | {row.seconds for row in asked}
    seconds = sorted(times | {trace.begin, trace.seconds})
    resident: dict[str, list[int]] = {}
    allocated: dict[str, list[int]] = {}
    known = dict.fromkeys(row.tag for row in samples)
    for tag in (name for name in trace.tags if name in known):
        own = [row for row in samples if row.tag == tag]
        moments = [row.seconds for row in own]
        latest = [bisect_right(moments, at) - 1 for at in seconds]
        resident[tag] = [own[index].resident_bytes if index >= 0 else 0 for index in latest]
        allocated[tag] = [own[index].allocated_bytes if index >= 0 else 0 for index in latest]
    moments = [row.seconds for row in asked]
    latest = [bisect_right(moments, at) - 1 for at in seconds]
    free = [asked[index].free_bytes if index >= 0 else None for index in latest]
    kept = _kept(resident, len(seconds), most)
    return DeviceSeries(
        device=device,
        seconds=[seconds[index] for index in kept],
        resident={tag: [line[index] for index in kept] for tag, line in resident.items()},
        allocated={tag: [line[index] for index in kept] for tag, line in allocated.items()},
        free=[free[index] for index in kept],
        total_bytes=max((row.total_bytes for row in asked), default=0),
    )


def peaks(trace: Trace) -> dict[str, int]:
    """The most device memory that each tag held at one time, on all devices together, bytes."""
    now: dict[tuple[str, int], int] = {}
    sums: dict[str, int] = {}
    most: dict[str, int] = {}
    for row in trace.samples:
        before = now.get((row.tag, row.device), 0)
        now[row.tag, row.device] = row.resident_bytes
        sums[row.tag] = sums.get(row.tag, 0) + row.resident_bytes - before
        most[row.tag] = max(most.get(row.tag, 0), sums[row.tag])
    return most


def _kept(lines: dict[str, list[int]], count: int, most: int) -> list[int]:
    """Which points to keep: all, or of each stretch the first, the last and both extremes."""
    if count <= most:
        return list(range(count))
    sums = [sum(values) for values in zip(*lines.values(), strict=True)] or [0] * count
    stretch = -(-count * 4 // most)
    kept: set[int] = set()
    for first in range(0, count, stretch):
        within = range(first, min(first + stretch, count))
        kept |= {within[0], within[-1], min(within, key=sums.__getitem__)}
        kept.add(max(within, key=sums.__getitem__))
    return sorted(kept)
