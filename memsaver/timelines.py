"""Recording what happens to the memory of tags, and saving it as a trace, a page or a picture."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from memsaver.background import can_start_threads
from memsaver.errors import (
    ConfigError,
    InvalidStateError,
    MemsaverError,
    OutOfHostMemoryError,
)
from memsaver.latches import Latch
from memsaver.native import _C
from memsaver.traces.trace import DeviceSample, TagSample, TagTransition, Trace, trace_of

__all__ = ["Timeline", "timeline"]

_MOST_EVENTS = 1 << 24  # of the core


class Timeline:
    """A recording of this process: made by `timeline()`, used as a context manager. Any thread.

    What is recorded can be read and saved while it goes on, and after its end.
    """

    def __init__(self, events: int, interval: float | None) -> None:
        whole = isinstance(events, int) and not isinstance(events, bool)
        if not (whole and 1 <= events <= _MOST_EVENTS):
            raise ConfigError(
                f"a timeline has room for a number of events from 1 to {_MOST_EVENTS}, not "
                f"{events!r}"
            )
        number = isinstance(interval, int | float) and not isinstance(interval, bool)
        if interval is not None and not (number and 0 < interval <= threading.TIMEOUT_MAX):
            raise ConfigError(
                f"an interval is a number of seconds above zero, up to "
                f"{threading.TIMEOUT_MAX:.0f}, not {interval!r}"
            )
        self._events = events
        self._interval = interval
        # No lock, because a finalizer or a signal handler may run in the middle of any method.
        self._recording: _Recording | None = None  # the recording in progress
        self._unstopped: list[_Recording] = []  # the same; the thread that pops it stops it
        self._sampling: list[tuple[threading.Thread, Latch]] = []
        self._trace: Trace | None = None

    # Native, so that no signal handler runs between starting or stopping and recording it.
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
        """Begin to record, as `with` does. Discards the result of an earlier recording.

        Raises:
            InvalidStateError: this process is already recording a timeline; it records one at a
                time.
            OutOfHostMemoryError: there is no room for the events, or no thread can be started for
                the interval. Nothing is recorded.
        """
        _C.uninterrupted(self._start)

    def _start(self) -> None:
        recording = _Recording(time.clock_gettime(time.CLOCK_MONOTONIC), time.time(), os.getpid())
        _C.timeline_start(self._events)
        self._trace, self._recording = None, recording
        self._unstopped.append(recording)
        if self._interval is None or not can_start_threads():
            return
        over = Latch()
        sampler = threading.Thread(
            target=_sample,
            args=(self._interval, over),
            name="memsaver-timeline",
            daemon=True,
        )
        try:
            sampler.start()
        except RuntimeError as error:
            self._unstopped.remove(recording)
            _C.timeline_stop()
            self._recording = None
            raise OutOfHostMemoryError(
                f"cannot start the thread that samples at an interval ({error}): record without an "
                "interval"
            ) from None
        self._sampling.append((sampler, over))
        atexit.register(self._end_sampling)  # no driver call while the process is torn down

    def stop(self) -> None:
        """End the recording, as leaving the `with` does. Does nothing if it has ended.

        Raises:
            OutOfHostMemoryError: there is no host memory for the result, and the recording goes on;
                call again.
        """
        _C.uninterrupted(self._stop, True)

    def _stop(self) -> None:
        try:
            recording = self._unstopped.pop()
        except IndexError:  # it has ended, or another thread stops it
            return
        if os.getpid() == recording.process:
            try:
                _C.timeline_sample()
                self._trace = _read(recording)  # set before the end, for other threads
                _C.timeline_stop()
            except BaseException:
                self._unstopped.append(recording)
                raise
        else:
            _stop_in_child()
        self._recording = None
        self._end_sampling()

    def _end_sampling(self) -> None:
        while self._sampling:
            sampler, over = self._sampling.pop()
            over.open()
            sampler.join()
            atexit.unregister(self._end_sampling)

    @property
    def trace(self) -> Trace:
        """What is recorded so far, or was until the end.

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
        """Pauses, resumes and swaps, one row for each tag and device, in the order they began."""
        return self.trace.transitions

    @property
    def samples(self) -> tuple[TagSample, ...]:
        """The memory of each tag and device, whenever it changed."""
        return self.trace.samples

    @property
    def memory(self) -> tuple[DeviceSample, ...]:
        """What the driver had free, at each transition and each interval."""
        return self.trace.memory

    @property
    def dropped(self) -> int:
        """How many events made place for later ones: the oldest. 0: everything is there."""
        return self.trace.dropped

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write what is recorded to a file, of the kind that its name's ending says.

        - `.json`: a trace for ui.perfetto.dev, chrome://tracing and `memsaver trace`.
        - `.html`: one page with an interactive chart, which needs nothing else.
        - `.png`, `.svg`, `.pdf`: a picture; needs matplotlib (`pip install memsaver[plot]`).

        A file that is there is replaced, when the new one is whole.

        Returns:
            The file's path.

        Raises:
            ConfigError: another ending, or matplotlib is missing for a picture.
            InvalidStateError: the recording has not begun.
            OSError: the file cannot be written.
        """
        from memsaver.traces import files  # not before: it takes json

        return files.save(self.trace, path)


def timeline(*, events: int = 1 << 16, interval: float | None = None) -> Timeline:
    """Record allocations and transitions of this process, and what the driver had free.

        with memsaver.timeline() as t:
            ...
        t.save("trace.json")   # Perfetto
        t.save("memory.html")  # an interactive chart

    An event costs less than a microsecond; the driver is asked for its free memory at the begin and
    the end of each transition. While nothing is recorded all of it costs nothing. What a child
    process does that is forked meanwhile is not recorded here; the recording has no trace there.

    Args:
        events: the most events that are kept, each about 140 bytes of memory. Further events
            replace the oldest, and `Timeline.dropped` counts the replaced ones. An allocation or a
            free is one event, a transition two for each of its tags and devices, and two of each
            device.
        interval: seconds between additional queries of the driver's free memory, on another thread,
            which show other processes' memory; None queries it only at transitions.

    Raises:
        ConfigError: `events` is not a number from 1 to 2^24, or `interval` is not above zero or
            longer than a thread can wait.
    """
    return Timeline(events, interval)


@dataclass(frozen=True)
class _Recording:
    """The start of a recording.

    Attributes:
        clock: the start in seconds of the monotonic clock.
        started: the start in seconds since 1970.
        process: the id of the process that records.
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


def _stop_in_child() -> None:
    try:
        _C.timeline_stop()
    except MemsaverError:
        pass  # the library is inert there


def _sample(interval: float, over: Latch) -> None:
    while not over.wait(interval):
        try:
            _C.timeline_sample()
        except MemsaverError:
            return  # a process in which the driver cannot be asked any more
