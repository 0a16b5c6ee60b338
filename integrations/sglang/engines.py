"""Calls to an engine: an `sglang.Engine` of this process, or a server at a URL.

Each call is one request and keeps no state; `sleep.SleepController` keeps the state. Every call has
a timeout in seconds, except a generation of this process's engine.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol

from memsaver.errors import ConfigError, InvalidStateError, MemsaverError
from memsaver.integrations.sglang.errors import EngineError, EngineTimeoutError
from memsaver.integrations.sglang.protocol import Answer, SchedulerState, states_of
from memsaver.integrations.sglang.served import ServedEngine
from memsaver.timeouts import check_timeout

__all__ = ["Engine", "LocalEngine", "ServedEngine", "connect"]

_POLL_SECONDS = 0.05


class Engine(Protocol):
    """What a controller needs of an engine.

    Errors: `EngineTimeoutError` where there is no answer in time, `EngineError` where the engine is
    gone or refuses, memsaver's own where its hooks in the schedulers tell of one.
    """

    def release(self, tags: Sequence[str], timeout: float) -> list[Answer]:
        """Release memory. Returns the schedulers' answers, [] if they do not reach the caller."""

    def resume(self, tags: Sequence[str], timeout: float) -> list[Answer]:
        """Resume memory. Returns answers as `release` does."""

    def states(self, timeout: float) -> list[SchedulerState]:
        """How the schedulers are, one for each data-parallel rank; [] without memsaver's hooks."""

    def flush(self, timeout: float) -> bool:
        """Flush the prefix cache; False where requests are in flight, and nothing was done."""

    def abort(self, timeout: float) -> None:
        """Abort all requests; they may take a moment to end."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as `sglang.Engine.generate` does. `ServedEngine.generate` has a timeout."""


def connect(engine: Any, api_key: str | None = None) -> Engine:
    """Return an `Engine` for the calls to `engine`.

    Args:
        engine: an `sglang.Engine`, the URL of an SGLang server, or the result of an earlier call.
        api_key: the server's API key (its admin key, if it has one).

    Raises:
        ConfigError: `engine` is none of these, or the URL or the key is invalid. The message
            contains neither the URL nor the key.
        NotLoadedError: `engine` is a URL, and httpx is not installed.
    """
    if isinstance(engine, str):
        engine = ServedEngine(engine, api_key)
    if isinstance(engine, LocalEngine | ServedEngine):
        link: Engine = engine
        return link
    if not all(hasattr(engine, name) for name in ("loop", "tokenizer_manager", "generate")):
        raise ConfigError(
            f"the engine must be an sglang.Engine or a server's URL, not {type(engine).__name__}"
        )
    return LocalEngine(engine)


class LocalEngine:
    """An `sglang.Engine` of this process. Any thread, but none inside an event loop.

    Its calls run on the engine's event loop, which one thread can drive at a time. While another
    one does (it generates, say), that thread runs them; generations take turns.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        # Owned by the thread that drives the loop, or is about to. Reentrant, for a finalizer or a
        # signal handler of that thread: a loop that runs already refuses to be driven.
        self._driving = threading.RLock()

    @property
    def engine(self) -> Any:
        """The `sglang.Engine`."""
        return self._engine

    def release(self, tags: Sequence[str], timeout: float) -> list[Answer]:
        """See `Engine`."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput as Request

        request = Request(tags=list(tags))
        ask = self._engine.tokenizer_manager.release_memory_occupation
        return self.run("a release", lambda: ask(request, None), timeout) or []

    def resume(self, tags: Sequence[str], timeout: float) -> list[Answer]:
        """See `Engine`."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput as Request

        request = Request(tags=list(tags))
        ask = self._engine.tokenizer_manager.resume_memory_occupation
        return self.run("a resume", lambda: ask(request, None), timeout) or []

    def states(self, timeout: float) -> list[SchedulerState]:
        """See `Engine`."""
        ask = self._engine.tokenizer_manager.get_internal_state
        states: list[SchedulerState] = states_of(self.run("its state", ask, timeout))
        return states

    def flush(self, timeout: float) -> bool:
        """See `Engine`."""
        ask = self._engine.tokenizer_manager.flush_cache
        return bool(self.run("a flush", ask, timeout).success)

    def abort(self, timeout: float) -> None:
        """See `Engine`."""

        async def ask() -> None:
            self._engine.tokenizer_manager.abort_request(abort_all=True)

        self.run("an abort", ask, timeout)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """See `Engine`."""
        with self._driving:
            self._check_idle()
            result = self._engine.generate(*args, **kwargs)
        return self._stream(iter(result)) if kwargs.get("stream") else result

    def _stream(self, items: Iterator[Any]) -> Iterator[Any]:
        end = object()
        while True:
            with self._driving:  # not between items, which may be long
                self._check_idle()
                item = next(items, end)
            if item is end:
                return
            yield item

    def _check_idle(self) -> None:
        if self._engine.loop.is_running():
            raise InvalidStateError(
                "the engine cannot generate now, because its event loop is running already: in "
                "this thread, which a finalizer or a signal handler has interrupted, or driven by "
                "another caller; generate after that call"
            )

    def run(self, what: str, ask: Callable[[], Coroutine[Any, Any, Any]], timeout: float) -> Any:
        """Run a coroutine on the engine's event loop, and return its result.

        Args:
            what: the call in words, for errors.
            ask: makes the coroutine.
            timeout: seconds until the coroutine is cancelled.

        Raises:
            ConfigError: the timeout is not a positive number.
            EngineTimeoutError: the coroutine did not return in time.
            EngineError: the engine's processes ended, or the coroutine raised. memsaver's own
                errors are raised unchanged.
            InvalidStateError: the calling thread runs an event loop.
        """
        check_timeout(timeout)
        loop: asyncio.AbstractEventLoop = self._engine.loop
        if _is_in_event_loop():
            raise InvalidStateError(
                "the controller cannot wait inside an event loop: call it by "
                "`await asyncio.to_thread(...)`"
            )
        if loop.is_closed():
            raise EngineError("the engine was shut down")
        if ended := self._ended():
            raise EngineError(f"the engine is dead: {ended}")
        future = asyncio.run_coroutine_threadsafe(ask(), loop)
        self._drive(loop, future, time.monotonic() + timeout)
        if not future.done():
            future.cancel()
            if ended := self._ended():
                raise EngineError(f"the engine died before it answered {what}: {ended}")
            raise EngineTimeoutError(
                f"the engine did not answer {what} within {timeout:.3g} s; it may be dead, or busy"
            )
        try:
            return future.result()
        except MemsaverError:
            raise
        except Exception as error:
            raise EngineError(
                f"the engine failed at {what}: {type(error).__name__}: {error}"
            ) from error

    def _drive(
        self,
        loop: asyncio.AbstractEventLoop,
        future: concurrent.futures.Future[Any],
        deadline: float,
    ) -> None:
        """Wait until `future`, which runs on `loop`, is done, or `deadline` is over.

        No longer than the engine's processes live. Another thread may drive the loop when this
        begins, or later, or stop doing so.
        """

        async def watch() -> None:
            answer = asyncio.wrap_future(future)
            while not (answer.done() or self._ended()) and time.monotonic() < deadline:
                await asyncio.wait([answer], timeout=min(_POLL_SECONDS, _left(deadline)))
            if answer.done() and not answer.cancelled():
                answer.exception()  # else asyncio logs it as one that nobody asked for

        while not (future.done() or loop.is_closed()) and time.monotonic() < deadline:
            if self._ended():
                return
            if loop.is_running() or not self._driving.acquire(blocking=False):
                concurrent.futures.wait([future], min(_POLL_SECONDS, _left(deadline)))
                continue
            watching = watch()
            try:
                loop.run_until_complete(watching)
            except RuntimeError:  # somebody who knows nothing of this was faster
                watching.close()
                time.sleep(0.001)
            finally:
                self._driving.release()

    def _ended(self) -> str:
        """Which of the engine's processes ended, in words; "" where they live or are not known."""
        watchdog = getattr(self._engine.tokenizer_manager, "_subprocess_watchdog", None)
        for process in getattr(watchdog, "_processes", ()):
            if not process.is_alive():
                return f"its process {process.pid} ended with status {process.exitcode}"
        return ""


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
