"""Record the memory of tags over time, and save the recording as a trace, a page or an image."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

from memsaver._runtime.background import can_start_threads, start_daemon
from memsaver._runtime.latches import Latch
from memsaver._runtime.native import _C
from memsaver.errors import (
    ConfigError,
    InvalidStateError,
    MemsaverError,
    OutOfHostMemoryError,
)
from memsaver.traces.trace import DeviceSample, TagSample, TagTransition, Trace, trace_of

__all__ = ["Timeline", "timeline"]

_MOST_EVENTS = 1 << 24  # the core's limit


class Timeline:
    """A recording of this process, created by `timeline()`. A context manager. Thread-safe.

    Experimental: this API can change in any version. The recording can be read and saved while it
    is running and afterwards. If the object is deleted, the recording stops.
    """

    def __init__(self, events: int, interval: float | None) -> None:
        whole = isinstance(events, int) and not isinstance(events, bool)
        if not (whole and 1 <= events <= _MOST_EVENTS):
            raise ConfigError(f"events must be an integer from 1 to {_MOST_EVENTS}, not {events!r}")
        number = isinstance(interval, int | float) and not isinstance(interval, bool)
        if interval is not None and not (number and 0 < interval <= threading.TIMEOUT_MAX):
            raise ConfigError(
                f"interval must be a number of seconds above zero, up to "
                f"{threading.TIMEOUT_MAX:.0f}, not {interval!r}"
            )
        self._events = events
        self._interval = interval
        # No lock, because a finalizer or a signal handler may run in the middle of any method.
        self._recording: _Recording | None = None  # the recording in progress
        self._unstopped: list[_Recording] = []  # the same; the thread that removes it stops it
        self._samplers: list[_Sampler] = []
        self._trace: Trace | None = None
        weakref.finalize(self, _abandon, self._unstopped, self._samplers).atexit = False

    # Native, so that no signal handler runs between starting or stopping a recording and updating
    # this object.
    __enter__ = _C.enter
    __exit__ = _C.exit

    def _enter(self) -> Timeline:
        self._start()
        return self

    def _leave(self, *_: object) -> None:
        self._stop()

    def __repr__(self) -> str:
        state = "recording" if self._recording else "over" if self._trace else "not begun"
        return f"<memsaver.Timeline: {state}>"

    def start(self) -> None:
        """Start recording, as on entry to a `with` block. Discards the result of an earlier
        recording.

        Raises:
            InvalidStateError: this process is already recording a timeline. A process can record
                only one timeline at a time.
            OutOfHostMemoryError: there is not enough memory for the events, or the thread for
                `interval` cannot be started. Nothing is recorded.
        """
        _C.uninterrupted(self._start)

    def _start(self) -> None:
        recording = _Recording(time.clock_gettime(time.CLOCK_MONOTONIC), time.time(), os.getpid())
        _C.timeline_start(self._events)
        self._trace, self._recording = None, recording
        self._unstopped.append(recording)
        if self._interval is None or not can_start_threads():
            return
        try:
            self._samplers.append(_Sampler(self._interval))
        except (RuntimeError, MemoryError) as error:
            self._unstopped.remove(recording)
            _C.timeline_stop()
            self._recording = None
            raise OutOfHostMemoryError(
                f"cannot start the thread that samples at an interval ({error}): record without an "
                "interval"
            ) from None

    def stop(self) -> None:
        """Stop recording, as on exit from a `with` block.

        If the recording has already stopped, the call has no effect.

        Raises:
            OutOfHostMemoryError: there is not enough host memory for the result. The recording
                continues, and `stop` can be called again.
        """
        _C.uninterrupted(self._stop, True)

    def _stop(self) -> None:
        try:
            recording = self._unstopped.pop()
        except IndexError:  # the recording has ended, or another thread is stopping it
            return
        if os.getpid() == recording.process:
            try:
                _C.timeline_sample()
                self._trace = _read(recording)  # set before stopping: other threads may read it
                _C.timeline_stop()
            except BaseException:
                self._unstopped.append(recording)
                raise
        else:
            _stop_natively()
        self._recording = None
        while self._samplers:
            self._samplers.pop().end()

    @property
    def trace(self) -> Trace:
        """The data recorded so far or, after the recording has stopped, the complete recording.

        Raises:
            InvalidStateError: the recording has not begun.
        """
        recording = self._recording
        if recording is not None:
            with contextlib.suppress(InvalidStateError):  # another thread is stopping it
                return _read(recording)
        if self._trace is None:
            raise InvalidStateError(
                "the timeline has recorded nothing: put the calls to record into "
                "`with memsaver.timeline() as t:`"
            )
        return self._trace

    @property
    def transitions(self) -> tuple[TagTransition, ...]:
        """The pauses, resumes and swaps, with one row for each tag and device, in order of their
        start times.
        """
        return self.trace.transitions

    @property
    def samples(self) -> tuple[TagSample, ...]:
        """The memory of each tag on each device, with one sample for each change."""
        return self.trace.samples

    @property
    def memory(self) -> tuple[DeviceSample, ...]:
        """The free memory that the driver reported at each transition and at each interval."""
        return self.trace.memory

    @property
    def dropped(self) -> int:
        """The number of old events that newer events replaced; 0 if the recording is complete."""
        return self.trace.dropped

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Save the recording to a file, in the format that the file's extension selects.

        - `.json`: a trace for ui.perfetto.dev, chrome://tracing and `memsaver trace`.
        - `.html`: a self-contained page with an interactive chart.
        - `.png`, `.svg`, `.pdf`: a picture; needs matplotlib (`pip install 'memsaver[plot]'`).

        An existing file is replaced only when the new file is complete.

        Returns:
            The file's path.

        Raises:
            ConfigError: the extension is unknown, or the format needs matplotlib, which is not
                installed.
            InvalidStateError: the recording has not begun.
            OSError: the file cannot be written.
        """
        from memsaver.traces import files  # imported late, because it imports json

        return files.save(self.trace, path)


def timeline(*, events: int = 1 << 16, interval: float | None = None) -> Timeline:
    """Record this process's allocations and transitions, and the free memory that the driver
    reports.

    Experimental: this API can change in any version.

        with memsaver.timeline() as t:
            ...
        t.save("trace.json")   # Perfetto
        t.save("memory.html")  # an interactive chart

    Recording an event takes less than a microsecond. Each transition also queries the free device
    memory at its start and end. There is no cost while nothing is being recorded. Events of a
    forked child are not recorded, and the child cannot read the parent's recording.

    Args:
        events: the maximum number of events to keep. Each event needs about 140 bytes. Further
            events replace the oldest ones, and `Timeline.dropped` counts those replaced. An
            allocation or a free produces one event. A transition produces two events for each of
            its tags on each device, plus two for each device.
        interval: the time, in seconds, between additional queries of the free device memory, made
            by a separate thread. These queries show changes made by other processes. If None, the
            memory is queried only at transitions.

    Raises:
        ConfigError: `events` is not an integer from 1 to 2^24, or `interval` is not positive or is
            longer than a thread can wait.
    """
    return Timeline(events, interval)


@dataclass(frozen=True)
class _Recording:
    """The start of a recording.

    Attributes:
        clock: the start, in seconds of the monotonic clock.
        started: the start, in seconds since 1970.
        process: the id of the recording process.
    """

    clock: float
    started: float
    process: int


def _read(recording: _Recording) -> Trace:
    rows, dropped = _C.timeline_read()
    seconds = round(time.clock_gettime(time.CLOCK_MONOTONIC) - recording.clock, 9)
    return trace_of(
        rows,
        dropped,
        clock=recording.clock,
        started=recording.started,
        seconds=seconds,
        process=recording.process,
    )


class _Sampler:
    """A thread that samples the free memory at an interval.

    Raises RuntimeError or MemoryError if the thread cannot be started.
    """

    def __init__(self, interval: float) -> None:
        self.is_over = Latch()
        self._thread = start_daemon("timeline", functools.partial(_sample, interval, self.is_over))
        atexit.register(self.end)  # so that no driver call runs at exit

    def end(self) -> None:
        self.is_over.open()
        self._thread.join()
        atexit.unregister(self.end)


def _abandon(unstopped: list[_Recording], samplers: list[_Sampler]) -> None:
    """Stop the recording of a deleted `Timeline`."""
    for sampler in samplers:  # without waiting, because the sampler may be the deleting thread
        sampler.is_over.open()
    while unstopped:
        unstopped.pop()
        _stop_natively()


def _stop_natively() -> None:
    """Stop the core's recording. Does nothing in a forked child."""
    try:
        _C.timeline_stop()
    except MemsaverError:
        pass  # the library is inert in a forked child


def _sample(interval: float, over: Latch) -> None:
    while not over.wait(interval):
        try:
            _C.timeline_sample()
        except MemsaverError:
            return  # the driver no longer works in this process
