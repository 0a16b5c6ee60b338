"""`SleepController`: puts an SGLang engine to sleep and wakes it, and lets nothing kill it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from memsaver.errors import InvalidStateError, MemsaverError
from memsaver.integrations.sglang.engines import Engine, connect
from memsaver.integrations.sglang.errors import EngineError, EngineTimeoutError
from memsaver.integrations.sglang.knowledge import Knowledge
from memsaver.integrations.sglang.protocol import (
    RELEASE_ORDER,
    RESUME_ORDER,
    WEIGHTS,
    SchedulerState,
    error_of,
)
from memsaver.integrations.sglang.reports import SleepReport, Step, rank_reports, timed
from memsaver.integrations.sglang.requests import Requests, busy
from memsaver.integrations.sglang.status import Status, needs_of, selected, status_of
from memsaver.latches import Gate
from memsaver.timeouts import check_timeout

__all__ = ["SleepController", "Status"]

_POLL_SECONDS = 0.02
_ASKED_AT_MOST = 4  # for states that belong together

# HTTP statuses by which a server says that it did not pass the call on to the engine.
_NOT_ASKED = (307, 308, 401, 403, 404, 405, 422)


class SleepController:
    """Puts an SGLang engine to sleep and wakes it, by tags: "kv_cache", "weights", "cuda_graph".

    Every call skips tags that are already as requested. Calls that would end the engine are refused
    before the engine receives them: releasing memory that requests use, and generating without it.

        engine = SleepController(sglang.Engine(enable_memory_saver=True, ...))
        engine.sleep(wait_idle=True)          # all tags; the trainer may use the memory
        with engine.staged_wake():            # the weights are there: update them, drop the
            update_weights()                  # trainer's copy
        engine.generate(...)                  # the KV cache and the graphs are there, too

    With memsaver's plugin in the engine, a call that fails (for example without enough memory)
    leaves the engine alive and unchanged on all ranks, and can be made again. The state is the
    engine's own, even after errors and when other clients release or resume tags. Without the
    plugin, a failure ends the engine, and the controller knows only its own calls and `released`.

    Threads: any. `sleep` and `wake_up` run one after the other; generations run concurrently. Do
    not call them in an event loop: use `await asyncio.to_thread(controller.sleep)`. `sleep` detects
    requests that did not come through the controller when it begins. Without the plugin, a request
    that arrives just after that is fatal. A request while the engine sleeps is always fatal, and
    SGLang's `/health` makes one, unless `SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0`.

    Args:
        engine: an `sglang.Engine` of this process, a server's URL, or a result of
            `engines.connect`.
        api_key: the server's API key (its admin key, if it has one).
        released: the tags that are already released; needed only without the plugin.
        timeout: seconds for queries of the engine's state.

    Raises:
        ConfigError: `engine` is none of these, a tag is unknown, or the timeout, the address or the
            key is invalid. No message contains the key.
        NotLoadedError: `engine` is a URL, and httpx is not installed.
        EngineError: the engine cannot be reached.
    """

    def __init__(
        self,
        engine: Any,
        *,
        api_key: str | None = None,
        released: str | Sequence[str] = (),
        timeout: float = 60.0,
    ) -> None:
        check_timeout(timeout)
        self._engine: Engine = connect(engine, api_key)
        self._timeout = timeout
        self._turn = Gate(reentrant=True)  # passed by whoever changes the state
        self._requests = Requests()
        at_first = frozenset(selected(released, RELEASE_ORDER)) if released else frozenset()
        self._knowledge = Knowledge(at_first)
        self.refresh()

    @property
    def status(self) -> Status:
        """What is there, as far as this controller knows. `refresh` asks the engine."""
        released = self._knowledge.current()
        return status_of(released) if released is not None else Status.UNKNOWN

    @property
    def released(self) -> frozenset[str]:
        """The tags that are released, on one scheduler at least."""
        released: frozenset[str] = self._knowledge.anywhere
        return released

    @property
    def lost(self) -> frozenset[str]:
        """The tags that a failed sleep left mapped and whose contents without a backup are lost.

        Empty again after the engine's next successful sleep or wake-up.
        """
        lost: frozenset[str] = self._knowledge.lost
        return lost

    @property
    def guarded(self) -> bool:
        """Whether memsaver's plugin is in the engine."""
        return bool(self._knowledge.guarded)

    def refresh(self) -> Status:
        """Query the engine's state. Without the plugin the engine reports none; nothing changes.

        Raises:
            EngineError: the engine does not answer within the controller's `timeout`; or it had
                memsaver's plugin and no longer has it, so another engine took its place.
        """
        deadline = time.monotonic() + self._timeout
        with self._turn_before(deadline):
            self._knowledge.learn(self._states(deadline))
            return self.status

    def check(self, operation: str) -> None:
        """Raise `InvalidStateError` where the engine would not survive it.

        Args:
            operation: "generate" or "update_weights".
        """
        needed = needs_of(operation)
        closed, released = self._requests.closed, self._knowledge.current()
        if closed or released is None:
            what = "is about to sleep" if closed else "is in an unknown state"
            raise InvalidStateError(f"the engine {what}: it cannot {operation} now")
        missing = [tag for tag in RESUME_ORDER if tag in released & needed]
        if missing:
            raise InvalidStateError(
                f"the engine cannot {operation} while {', '.join(missing)} is released; "
                "wake it up first",
                tag=missing[0],
            )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as `sglang.Engine.generate` does, if the memory for it is there.

        For a server at a URL, arguments and results are JSON, there are no streams, and `timeout`
        is in seconds for the whole call, by default an hour. A stream counts as a request from its
        first item to its end.

        Raises:
            InvalidStateError: memory that generation needs is released, or being released.
            EngineError: the engine failed.
        """
        if kwargs.get("stream"):
            self.check("generate")
            return self._stream(args, kwargs)
        with self._requests.one(lambda: self.check("generate")):
            return self._engine.generate(*args, **kwargs)

    @contextlib.contextmanager
    def request(self, operation: str = "generate") -> Iterator[None]:
        """Count the block as a request in flight, for a caller that calls the engine directly.

        A sleep refuses or waits during the block, as during `generate`.

        Raises:
            ConfigError, InvalidStateError: see `check`.
        """
        with self._requests.one(lambda: self.check(operation)):
            yield

    def sleep(
        self,
        tags: str | Sequence[str] | None = None,
        *,
        wait_idle: bool = False,
        abort: bool = False,
        flush: bool = False,
        timeout: float = 60.0,
    ) -> SleepReport:
        """Release the memory of `tags`; None means all tags.

        Skips released tags. SGLang flushes its prefix cache if "kv_cache" is among the tags.

        Args:
            tags: a tag, or several.
            wait_idle: wait until no request is in flight, instead of refusing.
            abort: abort the requests in flight, and wait for their end.
            flush: flush the prefix cache even if only other tags are released, for example before
                new weights. Without the plugin this is always done, because it reveals a busy
                engine.
            timeout: seconds for the whole call, including the wait for another thread's call and
                the query of the state.

        Raises:
            ConfigError: an unknown tag, an empty list of tags, or an invalid timeout.
            EngineBusyError: requests are in flight, after `timeout` if the call waits for them. The
                engine is unchanged.
            EngineTimeoutError: the engine did not answer, and the status is unknown until it does;
                or another thread's call did not end in time, and nothing was done.
            EngineError: the engine failed. With the plugin it is unchanged, if it still answers.
            MemsaverError: with the plugin, the reason why memory could not be released; all is
                mapped.
        """
        wanted = selected(tags, RELEASE_ORDER)
        check_timeout(timeout)
        deadline = time.monotonic() + timeout
        with self._turn_before(deadline):
            self._settle(deadline)
            going = [tag for tag in wanted if tag not in self._knowledge.everywhere]
            skipped = tuple(tag for tag in wanted if tag not in going)
            if not going:
                return SleepReport((), skipped)
            steps: list[Step] = []

            def hurry() -> None:
                if abort:
                    steps.append(timed("abort", lambda: self._engine.abort(_left(deadline))))

            with self._requests.none(wait_idle or abort, hurry, lambda: _left(deadline)):
                self._drain(wait_idle or abort, flush, deadline, steps)
                steps.append(self._ask("release", going, deadline))
            return SleepReport(tuple(steps), skipped)

    def wake_up(
        self, tags: str | Sequence[str] | None = None, *, timeout: float = 60.0
    ) -> SleepReport:
        """Allocate memory for `tags` again; None means all released tags.

        Skips tags that are not released. Tags with a backup have their contents again, weights
        without one must be loaded, and the KV cache is empty.

        Args:
            tags: a tag, or several.
            timeout: seconds for the whole call, see `sleep`.

        Raises:
            ConfigError: an unknown tag, an empty list of tags, or an invalid timeout.
            OutOfDeviceMemoryError: with the plugin, too little memory is free on some rank, for
                example because a trainer still uses it. The tags are released as before, the engine
                is alive, and the call can be made again.
            EngineTimeoutError, EngineError, MemsaverError: see `sleep`.
        """
        wanted = selected(tags, RESUME_ORDER)
        check_timeout(timeout)
        deadline = time.monotonic() + timeout
        with self._turn_before(deadline):
            self._settle(deadline)
            coming = [tag for tag in wanted if tag in self._knowledge.anywhere]
            skipped = tuple(tag for tag in wanted if tag not in coming)
            if not coming:
                return SleepReport((), skipped)
            return SleepReport((self._ask("resume", coming, deadline),), skipped)

    @contextlib.contextmanager
    def asleep(
        self, tags: str | Sequence[str] | None = None, **options: Any
    ) -> Iterator[SleepReport]:
        """Sleep for the block, and wake what went to sleep at its end, also after an exception.

        Args and errors are those of `sleep` and `wake_up`. Yields the report of `sleep`.
        """
        report = self.sleep(tags, **options)
        try:
            yield report
        finally:
            if report.changed:
                self.wake_up(report.changed)

    @contextlib.contextmanager
    def staged_wake(self, *, timeout: float = 60.0) -> Iterator[list[SleepReport]]:
        """Wake the weights for the block, which updates them, and the rest when it is done.

        So the memory of the KV cache and the graphs is needed only when the block has given up
        its own copy of the weights. After an exception in the block the rest sleeps on, and the
        weights are there: update them again and `wake_up()`, or `sleep()`.

        Yields a list of the reports, which has the second one after the block. Errors are those of
        `wake_up`, for each of both.
        """
        reports = [self.wake_up(WEIGHTS, timeout=timeout)]
        yield reports
        reports.append(self.wake_up(timeout=timeout))

    # --- requests ---------------------------------------------------------------------------------

    def _stream(self, args: Any, kwargs: Any) -> Iterator[Any]:
        with self._requests.one(lambda: self.check("generate")):
            yield from self._engine.generate(*args, **kwargs)

    def _drain(self, wait: bool, flush: bool, deadline: float, steps: list[Step]) -> None:
        """See to it that no request is in flight, whoever made it."""

        def until_idle() -> None:
            while not self._is_idle(deadline):
                if not wait or time.monotonic() >= deadline:
                    raise busy()
                time.sleep(min(_POLL_SECONDS, _left(deadline)))

        steps.append(timed("wait_idle" if self.guarded else "flush", until_idle))
        if flush and self.guarded:
            steps.append(timed("flush", lambda: self._flush(deadline)))

    def _is_idle(self, deadline: float) -> bool:
        if not self.guarded:
            flushed: bool = self._engine.flush(_left(deadline))
            return flushed
        return all([state.idle for state in self._states(deadline)])

    def _flush(self, deadline: float) -> None:
        if not self._engine.flush(_left(deadline)):
            raise busy()

    # --- the engine -------------------------------------------------------------------------------

    def _turn_before(self, deadline: float) -> contextlib.AbstractContextManager[None]:
        """For the block, no other thread changes the state."""
        return self._turn.passed(
            _left(deadline),
            lambda: EngineTimeoutError(
                "another thread's sleep or wake-up by this controller did not end in time; "
                "nothing was done"
            ),
        )

    def _states(self, deadline: float) -> list[SchedulerState]:
        """How the schedulers are. SGLang counts replies, and late ones to an earlier question too.

        Raises:
            EngineError: the replies were not one of each scheduler, however often it was asked. The
                state is unknown then.
        """
        for _ in range(_ASKED_AT_MOST):
            states: list[SchedulerState] = self._engine.states(min(self._timeout, _left(deadline)))
            if not states:
                self._knowledge.learn(states)  # raises if another engine took this one's place
            if self._knowledge.fits(states):
                return states
        self._knowledge.doubt()
        raise EngineError(
            f"the engine's {len(states)} replies were not one of each of its schedulers, or were "
            "late ones: a scheduler may be slow, or hang; ask again (`refresh`)"
        )

    def _ask(self, operation: str, tags: Sequence[str], deadline: float) -> Step:
        """Release or resume, and know what holds then."""
        if time.monotonic() >= deadline:
            raise EngineTimeoutError(f"there was no time left for the {operation}")
        ask = self._engine.release if operation == "release" else self._engine.resume
        self._knowledge.doubt()
        started = time.monotonic()
        try:
            answers = ask(tags, _left(deadline))
        except BaseException as error:
            self._after_failure(error, deadline)
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
            failed = error_of(answers)
            if failed is not None:  # which a server did not pass on
                raise failed
            self._knowledge.check_done(operation, tags)
        return Step(operation, tuple(tags), seconds, rank_reports(answers))

    def _after_failure(self, error: BaseException, deadline: float) -> None:
        """Find out what the state is. Raises what the engine says of a failure in its place."""
        if isinstance(error, EngineError) and error.http_status in _NOT_ASKED:
            self._knowledge.trust()
            return
        if time.monotonic() >= deadline:
            return
        try:
            states = self._states(deadline)
        except MemsaverError:
            return
        told = error_of(self._knowledge.newer([state.last for state in states]))
        self._knowledge.learn(states)
        if told is not None and isinstance(error, EngineError):
            raise told from error

    def _settle(self, deadline: float) -> None:
        """Know the state, or refuse."""
        if self.guarded or self._knowledge.is_known:  # another engine may have taken its place
            self._knowledge.learn(self._states(deadline))
        if not self._knowledge.is_known:
            raise InvalidStateError(
                "the tags that the engine has released are unknown since its last failure, because "
                "it lacks memsaver's plugin: restart it"
            )


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
