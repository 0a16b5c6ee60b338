"""`EngineController`: puts an engine to sleep, wakes it, and rejects calls that would crash it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from memsaver._runtime.latches import Gate
from memsaver._runtime.timeouts import check_timeout, seconds_until
from memsaver.errors import ConfigError, InvalidStateError, MemsaverError

from .errors import EngineError, EngineTimeoutError
from .interface import Engine
from .knowledge import Knowledge
from .messages import SchedulerState, error_of
from .reports import SleepReport, Step, rank_reports, timed
from .requests import Requests, busy
from .status import Status, check_operation, status_of
from .tags import RELEASE_ORDER, RESUME_ORDER, WEIGHTS, Tags, selected

__all__ = ["EngineController"]

_POLL_SECONDS = 0.02
_MOST_QUERIES = 4  # attempts to receive one state from each scheduler

# The HTTP statuses of a server that did not forward the call to its engine.
_NOT_PASSED_ON = (307, 308, 401, 403, 404, 405, 422)


class EngineController:
    """Puts an engine to sleep and wakes it by tag ("kv_cache", "weights", "cuda_graph").

    Every call skips tags that are already in the requested state. Two kinds of calls would crash
    the engine, and are rejected before the engine receives them: a release of memory that requests
    use, and a generation while that memory is released.

    Threads: any. Calls to `sleep` and `wake_up` are serialized; generations run concurrently. Do
    not call these methods in an event loop: use `await asyncio.to_thread(controller.sleep)`.

    Args:
        engine: the object that makes the calls to the engine.
        released: the tags that are already released; required only without memsaver's plugin.
        timeout: the limit on queries of the engine's state, in seconds.

    Raises:
        ConfigError: a tag is unknown, or the timeout is invalid.
        EngineError: the engine cannot be reached.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        released: str | Sequence[str] = (),
        timeout: float = 60.0,
    ) -> None:
        check_timeout(timeout)
        self._engine = engine
        self._timeout = timeout
        self._gate = Gate(reentrant=True)  # entered by a caller that changes the state
        self._requests = Requests()
        at_first = frozenset(selected(released, RELEASE_ORDER)) if released else frozenset()
        self._knowledge = Knowledge(at_first)
        self.refresh()

    @property
    def status(self) -> Status:
        """The last known status. Call `refresh` to query the engine."""
        return status_of(self._knowledge.current())

    @property
    def released(self) -> frozenset[str]:
        """The tags that are released on at least one scheduler."""
        return self._knowledge.anywhere

    @property
    def lost(self) -> frozenset[str]:
        """The tags whose contents were lost when the last sleep or wake-up failed.

        After a failed sleep, these tags are mapped, but contents that had no backup are lost. After
        a failed wake-up with `keep_weights=False`, the weights are released again, without their
        contents. The set is empty after the engine's next successful sleep or wake-up.
        """
        return self._knowledge.lost

    @property
    def guarded(self) -> bool:
        """Whether memsaver's plugin reports the engine's state and can refuse requests."""
        return self._knowledge.guarded

    def refresh(self) -> Status:
        """Query the state of an engine with memsaver's plugin. Does nothing without the plugin.

        Raises:
            EngineError: the engine does not answer within the controller's `timeout`, or no longer
                has memsaver's plugin, because another engine has replaced it.
        """
        deadline = time.monotonic() + self._timeout
        with self._exclusive(deadline):
            self._knowledge.learn(self._states(deadline))
            return self.status

    def check(self, operation: str) -> None:
        """Raise `InvalidStateError` if the engine cannot currently accept an operation.

        An engine that holds requests while asleep, or wakes up for requests, accepts every
        operation.

        Args:
            operation: "generate" or "update_weights".
        """
        closed = self._requests.closed
        accepts = closed or self._knowledge.admits
        check_operation(operation, frozenset() if accepts else self._knowledge.current())
        if closed:
            raise InvalidStateError(f"the engine is about to sleep: it cannot {operation} now")

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with the engine's own arguments and results, if the required memory is mapped.

        A stream counts as a request in flight from the request for its first item until its end. An
        engine that holds requests while asleep, or wakes up for requests, receives every request.

        Raises:
            EngineAsleepError: memory that generation needs is released.
            InvalidStateError: memory that generation needs is being released.
            EngineError: the engine failed.
        """
        if kwargs.get("stream"):
            self.check("generate")
            return self._stream(args, kwargs)
        with self._requests.one(lambda: self.check("generate")):
            return self._engine.generate(*args, **kwargs)

    @contextlib.contextmanager
    def request(self, operation: str = "generate") -> Iterator[None]:
        """Count the block as a request in flight, for callers that call the engine directly.

        During the block, a sleep raises an error or waits, as during `generate`.

        Raises:
            ConfigError, InvalidStateError: see `check`.
        """
        with self._requests.one(lambda: self.check(operation)):
            yield

    def sleep(
        self,
        tags: Tags = None,
        *,
        wait_idle: bool = False,
        abort: bool = False,
        flush: bool = False,
        keep_weights: bool = True,
        timeout: float = 60.0,
    ) -> SleepReport:
        """Release the memory of `tags`; None means all tags.

        Skips tags that are already released. Releasing "kv_cache" flushes the prefix cache.

        Args:
            tags: a tag, or several.
            wait_idle: whether to wait until no request is in flight, instead of raising an error.
            abort: whether to abort the requests in flight and wait until they have ended.
            flush: whether to flush the prefix cache even if "kv_cache" is not released, for example
                before new weights are loaded. Without the plugin, the cache is always flushed,
                because a failed flush shows that the engine is busy.
            keep_weights: whether the weights' contents are still needed. If False, all weights will
                be loaded again before they are used, and an engine that normally keeps its weights
                during a sleep need not save them. With the plugin, an engine with a draft model
                still keeps its weights; without the plugin, SGLang always keeps the weights.
            timeout: the limit on the whole call, in seconds, including the wait for another
                thread's call and the query of the state.

        Raises:
            ConfigError: an argument is invalid, or the engine has no saver or cannot refuse
                requests.
            EngineBusyError: requests are in flight or, if the call waits for requests, are still in
                flight after `timeout`. The engine is unchanged.
            EngineTimeoutError: the engine did not answer, and its status is unknown until it
                answers. Also raised if another thread's call did not end in time, in which case
                nothing was done.
            EngineError: the engine failed. With the plugin, an engine that answers is unchanged.
            MemsaverError: with the plugin, memory could not be released, and all memory is mapped.
                The error is the one that the schedulers reported.
        """
        wanted = selected(tags, RELEASE_ORDER)
        check_timeout(timeout)
        deadline = time.monotonic() + timeout
        with self._exclusive(deadline):
            self._settle(deadline)
            to_release = [tag for tag in wanted if tag not in self._knowledge.everywhere]
            skipped = tuple(tag for tag in wanted if tag not in to_release)
            if not to_release:
                return SleepReport((), skipped)
            steps: list[Step] = []

            def hurry() -> None:
                if abort:
                    steps.append(
                        timed("abort", lambda: self._engine.abort(seconds_until(deadline)))
                    )

            with self._requests.none(wait_idle or abort, hurry, lambda: seconds_until(deadline)):
                self._drain(wait_idle or abort, flush, deadline, steps)
                steps.append(self._request("release", to_release, deadline, keep_weights))
            return SleepReport(tuple(steps), skipped)

    def wake_up(
        self, tags: Tags = None, *, keep_weights: bool = True, timeout: float = 60.0
    ) -> SleepReport:
        """Allocate memory for `tags` again; None means all released tags.

        Skips tags that are not released. The contents of tags with a backup are restored. Weights
        without a backup must be loaded. The KV cache is empty.

        Args:
            tags: a tag, or several.
            keep_weights: whether the weights' contents are still needed. If False, all weights will
                be loaded again before they are used, and their contents are undefined until then.
                With the plugin, only the model's buffers are copied, unless there is a draft model.
            timeout: the limit on the whole call, in seconds; see `sleep`.

        Raises:
            ConfigError: a tag is unknown, the list of tags is empty, or the timeout is invalid.
            OutOfDeviceMemoryError: with the plugin, a rank has too little free memory, for example
                because a trainer still uses the memory. The tags remain released, the engine keeps
                running, and the call can be repeated.
            EngineTimeoutError, EngineError, MemsaverError: see `sleep`.
        """
        wanted = selected(tags, RESUME_ORDER)
        check_timeout(timeout)
        deadline = time.monotonic() + timeout
        with self._exclusive(deadline):
            self._settle(deadline)
            to_resume = [tag for tag in wanted if tag in self._knowledge.anywhere]
            skipped = tuple(tag for tag in wanted if tag not in to_resume)
            if not to_resume:
                return SleepReport((), skipped)
            step = self._request("resume", to_resume, deadline, keep_weights)
            return SleepReport((step,), skipped)

    @contextlib.contextmanager
    def asleep(self, tags: Tags = None, **options: Any) -> Iterator[SleepReport]:
        """Sleep during the block, and wake the same tags at its end, even after an exception.

        The arguments and errors are those of `sleep` and `wake_up`. Yields the report of `sleep`.
        """
        report = self.sleep(tags, **options)
        try:
            yield report
        finally:
            if report.changed:
                self.wake_up(report.changed, timeout=options.get("timeout", 60.0))

    @contextlib.contextmanager
    def staged_wake(self, *, timeout: float = 60.0) -> Iterator[list[SleepReport]]:
        """Wake the weights before a block that updates them, and wake the other tags after it.

        The memory of the KV cache and the graphs is thus mapped only after the block has freed its
        own copy of the weights. After an exception in the block, the other tags remain released,
        and the weights are mapped: update the weights again and call `wake_up()`, or call
        `sleep()`.

        Yields a list of the two wake-ups' reports; the second report is appended after the block.
        The errors are the same as for `wake_up`.
        """
        reports = [self.wake_up(WEIGHTS, timeout=timeout)]
        yield reports
        reports.append(self.wake_up(timeout=timeout))

    # --- requests ---------------------------------------------------------------------------------

    def _stream(self, args: Any, kwargs: Any) -> Iterator[Any]:
        with self._requests.one(lambda: self.check("generate")):
            yield from self._engine.generate(*args, **kwargs)

    def _drain(self, wait: bool, flush: bool, deadline: float, steps: list[Step]) -> None:
        """Wait until no client has a request in flight, or raise an error."""

        def until_idle() -> None:
            is_idle = self._is_idle(deadline)
            while not is_idle:
                if wait:
                    time.sleep(min(_POLL_SECONDS, seconds_until(deadline)))
                if not wait or time.monotonic() >= deadline:
                    raise busy()
                try:
                    is_idle = self._is_idle(deadline)
                except EngineTimeoutError as late:
                    if time.monotonic() < deadline:
                        raise
                    raise busy() from late  # the last answer reported requests in flight

        steps.append(timed("wait_idle" if self.guarded else "flush", until_idle))
        if flush and self.guarded:
            steps.append(timed("flush", lambda: self._flush(deadline)))

    def _is_idle(self, deadline: float) -> bool:
        if not self.guarded:
            return self._engine.flush(seconds_until(deadline))
        return all([state.idle for state in self._states(deadline)])

    def _flush(self, deadline: float) -> None:
        if not self._engine.flush(seconds_until(deadline)):
            raise busy()

    # --- the engine -------------------------------------------------------------------------------

    def _exclusive(self, deadline: float) -> contextlib.AbstractContextManager[None]:
        """Prevent other threads from changing the engine's state during the block."""
        return self._gate.passed(
            seconds_until(deadline),
            lambda: EngineTimeoutError(
                "another thread's sleep or wake-up by this controller did not end in time; "
                "nothing was done"
            ),
        )

    def _states(self, deadline: float) -> list[SchedulerState]:
        """Query the schedulers' states; repeat the query if a reply belonged to an earlier query.

        Raises:
            EngineError: no query returned one reply from each scheduler; the state is unknown.
        """
        for _ in range(_MOST_QUERIES):
            states = self._engine.states(min(self._timeout, seconds_until(deadline)))
            if not states:
                self._knowledge.learn(states)  # raises if the engine was replaced
            if self._knowledge.fits(states):
                return states
        self._knowledge.doubt()
        raise EngineError(
            f"the engine's {len(states)} replies did not come from each scheduler exactly once, or "
            "were late: a scheduler may be slow or hang; query again (`refresh`)"
        )

    def _request(
        self, operation: str, tags: Sequence[str], deadline: float, keep_weights: bool = True
    ) -> Step:
        """Request a release or a resume, and record the resulting state."""
        options = {} if keep_weights or WEIGHTS not in tags else {"keep_weights": False}
        if time.monotonic() >= deadline:
            raise EngineTimeoutError(f"there was no time left for the {operation}")
        call = self._engine.release if operation == "release" else self._engine.resume
        self._knowledge.doubt()
        started = time.monotonic()
        try:
            answers = call(tags, seconds_until(deadline), **options)
        except BaseException as error:
            self._after_failure(operation, error, deadline)
            raise
        seconds = time.monotonic() - started
        states: list[SchedulerState] = []
        if self.guarded and not self._knowledge.are_new(answers):
            states = self._states(deadline)
            answers = self._knowledge.newer([state.last for state in states])
        if not states:
            self._knowledge.note(operation, tags, answers)
        else:
            self._knowledge.learn(states)
            failed = error_of(one for one in answers if one.operation == operation)
            if failed is not None:  # a failure that the server did not report
                raise failed
            self._knowledge.check_done(operation, tags)
        return Step(operation, tuple(tags), seconds, rank_reports(answers))

    def _after_failure(self, operation: str, error: BaseException, deadline: float) -> None:
        """Query the state after a failure. Raises the error that the schedulers report, if any."""
        is_passed_on = not isinstance(error, ConfigError) or self.guarded
        if isinstance(error, EngineError) and error.http_status in _NOT_PASSED_ON:
            is_passed_on = False
        if not is_passed_on:
            self._knowledge.trust()
            return
        if time.monotonic() >= deadline:
            return
        try:
            states = self._states(deadline)
        except MemsaverError:
            return
        answers = self._knowledge.newer([state.last for state in states])
        reported = error_of(one for one in answers if one.operation == operation)
        self._knowledge.learn(states)
        is_told = type(reported) is type(error) and f"{reported}" in f"{error}"
        if reported is not None and isinstance(error, EngineError) and not is_told:
            raise reported from error

    def _settle(self, deadline: float) -> None:
        """Query the engine's state, and raise an error if it is unknown."""
        if self.guarded or self._knowledge.is_known:  # the engine may have been replaced
            self._knowledge.learn(self._states(deadline))
        if not self._knowledge.is_known:
            raise InvalidStateError(
                "the engine's released tags are unknown since its last failure, because it does "
                "not report them: restart it"
            )
