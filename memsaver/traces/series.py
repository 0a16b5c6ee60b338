"""A trace's memory, as series of values at common times, for charts."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TypeVar

from memsaver.traces.trace import TagSample, Trace

__all__ = ["DeviceSeries", "device_series", "peaks"]

_MOST_VALUES = 1 << 20  # limit on the values of all tags together, to bound a page's size
_LEAST_POINTS = 1000  # minimum number of points for any number of tags

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class DeviceSeries:
    """One device's memory over time. Each value applies from its time to the next time.

    Attributes:
        device: the device's index.
        seconds: the times in ascending order, from the trace's start to its end.
        resident: for each tag, its device memory at these times, in bytes.
        allocated: for each tag, the bytes of its live allocations.
        free: the free memory that the driver reported in the latest sample, or None before the
            first sample.
        total_bytes: the device's total memory; 0 if there are no samples.
    """

    device: int
    seconds: list[float]
    resident: dict[str, list[int]]
    allocated: dict[str, list[int]]
    free: list[int | None]
    total_bytes: int


def device_series(trace: Trace, device: int, most: int = 20_000) -> DeviceSeries:
    """Return a device's memory over time, reduced to about `most` points, or fewer for many tags.

    The reduction keeps the smallest and the largest total in each interval, so no peak is lost.
    """
    samples = [row for row in trace.samples if row.device == device]
    free_rows = [row for row in trace.memory if row.device == device]
    times = {row.seconds for row in samples} | {row.seconds for row in free_rows}
    every = sorted(times | {trace.begin, trace.seconds})
    by_tag: dict[str, list[TagSample]] = {}
    for row in samples:
        by_tag.setdefault(row.tag, []).append(row)
    most = min(most, max(_MOST_VALUES // max(len(by_tag), 1), _LEAST_POINTS))
    seconds = _thinned(every, _sums(samples, every), most)
    resident: dict[str, list[int]] = {}
    allocated: dict[str, list[int]] = {}
    for tag in (name for name in trace.tags if name in by_tag):
        own = by_tag[tag]
        moments = [row.seconds for row in own]
        resident[tag] = _line(seconds, moments, [row.resident_bytes for row in own], 0)
        allocated[tag] = _line(seconds, moments, [row.allocated_bytes for row in own], 0)
    free: list[int | None] = [row.free_bytes for row in free_rows]
    return DeviceSeries(
        device=device,
        seconds=seconds,
        resident=resident,
        allocated=allocated,
        free=_line(seconds, [row.seconds for row in free_rows], free, None),
        total_bytes=max((row.total_bytes for row in free_rows), default=0),
    )


def peaks(trace: Trace) -> dict[str, int]:
    """Return the peak of each tag's total device memory on all devices, in bytes."""
    now: dict[tuple[str, int], int] = {}
    sums: dict[str, int] = {}
    most: dict[str, int] = {}
    for row in trace.samples:
        before = now.get((row.tag, row.device), 0)
        now[row.tag, row.device] = row.resident_bytes
        sums[row.tag] = sums.get(row.tag, 0) + row.resident_bytes - before
        most[row.tag] = max(most.get(row.tag, 0), sums[row.tag])
    return most


def _sums(samples: list[TagSample], seconds: list[float]) -> list[int]:
    """Return the total memory of all tags at each of these times, in bytes."""
    now: dict[str, int] = {}
    total, index, sums = 0, 0, []
    for at in seconds:
        while index < len(samples) and samples[index].seconds <= at:
            row = samples[index]
            total += row.resident_bytes - now.get(row.tag, 0)
            now[row.tag] = row.resident_bytes
            index += 1
        sums.append(total)
    return sums


def _thinned(seconds: list[float], sums: list[int], most: int) -> list[float]:
    """Return the times to keep: all times, or the first, the last and both extremes of each
    interval.
    """
    if len(seconds) <= most:
        return seconds
    stretch = -(-len(seconds) * 4 // most)
    kept: set[int] = set()
    for first in range(0, len(seconds), stretch):
        within = range(first, min(first + stretch, len(seconds)))
        kept |= {within[0], within[-1], min(within, key=sums.__getitem__)}
        kept.add(max(within, key=sums.__getitem__))
    return [seconds[index] for index in sorted(kept)]


def _line(
    seconds: list[float], moments: list[float], values: list[_Value], before: _Value
) -> list[_Value]:
    """Return the last value at or before each of these times, or `before` if there is none."""
    begins = [bisect_left(seconds, moment) for moment in moments] + [len(seconds)]
    line = [before] * begins[0]
    for value, begin, end in zip(values, begins[:-1], begins[1:], strict=True):
        line += [value] * (end - begin)
    return line
