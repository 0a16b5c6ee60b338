"""SGLang as an `Engine`: an `sglang.Engine` in this process, or a server at a URL.

Every call has a timeout in seconds. For generation by an engine in this process, the timeout limits
only the wait for other threads' calls.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from memsaver._runtime.latches import Gate
from memsaver._runtime.timeouts import check_timeout
from memsaver.errors import ConfigError, InvalidStateError

from ..engine.interface import GENERATION_SECONDS
from ..engine.local_calls import check_call, result_of
from ..engine.locks import late_generation
from ..engine.messages import Answer, SchedulerState
from ..engine.processes import death_among
from .places import effective_arguments
from .protocol import FORGIVING, REWRITTEN, states_of
from .replies import Reply, UnknownRequestError
from .served import ServedEngine, check_memory_saver

__all__ = ["LocalEngine", "ServedEngine", "connect"]

# The classes of SGLang's requests, by the methods that accept them.
_REQUESTS = {
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "check_weights": "CheckWeightsReqInput",
    "continue_generation": "ContinueGenerationReqInput",
    "destroy_weights_update_group": "DestroyWeightsUpdateGroupReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
    "init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "pause_generation": "PauseGenerationReqInput",
    "release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "resume_memory_occupation": "ResumeMemoryOccupationReqInput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
}


def connect(engine: Any, api_key: str | None = None) -> LocalEngine | ServedEngine:
    """Return an `Engine` that makes calls to `engine`.

    Args:
        engine: an `sglang.Engine`, the URL of an SGLang server, or the result of an earlier call of
            this function.
        api_key: the server's API key, or its admin key if it has one.

    Raises:
        ConfigError: `engine` has an unsupported type, or the URL or the key is invalid. The
            message contains neither the URL nor the key.
        NotLoadedError: `engine` is a URL, and httpx is not installed.
    """
    if isinstance(engine, str):
        engine = ServedEngine(engine, api_key)
    if isinstance(engine, LocalEngine | ServedEngine):
        return engine
    if not all(hasattr(engine, name) for name in ("loop", "tokenizer_manager", "generate")):
        raise ConfigError(
            f"the engine must be an sglang.Engine or a server's URL, not {type(engine).__name__}"
        )
    return LocalEngine(engine)


class _DrivenError(Exception):
    """Raised if another thread drives the event loop."""


class LocalEngine:
    """An `sglang.Engine` in this process.

    Any thread may make calls, except a thread that runs an event loop. Calls run on the engine's
    event loop, which only one thread can drive at a time. While another thread drives the loop, for
    example during generation, that thread runs the calls. Generations are serialized.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        # Entered by the thread that drives the loop or is about to drive it. Reentrant for a
        # finalizer or a signal handler of that thread: `_check_idle` detects a running loop.
        self._driving = Gate(reentrant=True)

    @property
    def engine(self) -> Any:
        """The `sglang.Engine`."""
        return self._engine

    def release(
        self, tags: Sequence[str], timeout: float, keep_weights: bool = True
    ) -> list[Answer]:
        """See `Engine`.

        Raises:
            ConfigError: see `check_memory_saver`.
        """
        arguments = effective_arguments(self._engine.tokenizer_manager)
        check_memory_saver(getattr(arguments, "enable_memory_saver", None))
        return self._change("release_memory_occupation", tags, timeout, keep_weights)

    def resume(
        self, tags: Sequence[str], timeout: float, keep_weights: bool = True
    ) -> list[Answer]:
        """See `Engine`."""
        return self._change("resume_memory_occupation", tags, timeout, keep_weights)

    def _change(
        self, name: str, tags: Sequence[str], timeout: float, keep_weights: bool
    ) -> list[Answer]:
        fields = {"tags": list(tags)}
        rid = FORGIVING if keep_weights else REWRITTEN
        return self._submit(name, fields, timeout, rid=rid) or []

    def states(self, timeout: float) -> list[SchedulerState]:
        """See `Engine`."""
        query = self._engine.tokenizer_manager.get_internal_state
        return states_of(self.run("the query of its state", query, timeout))

    def flush(self, timeout: float) -> bool:
        """See `Engine`."""
        flush = self._engine.tokenizer_manager.flush_cache
        return bool(self.run("a flush", flush, timeout).success)

    def abort(self, timeout: float) -> None:
        """See `Engine`."""
        self._abort([{"abort_all": True}], timeout)

    def abort_requests(self, rids: Sequence[str], timeout: float) -> None:
        """Abort the requests with these ids that are in flight."""
        self._abort([{"rid": rid} for rid in rids], timeout)

    def arguments(self, timeout: float) -> dict[str, Any]:
        """Return the engine's arguments that a backend reads, and its version if known."""
        try:
            from sglang.version import __version__ as version
        except ImportError:
            version = None
        server_args = effective_arguments(self._engine.tokenizer_manager)
        names = ("tp_size", "pp_size", "dp_size", "enable_dp_attention", "skip_tokenizer_init")
        return {**{name: getattr(server_args, name, None) for name in names}, "version": version}

    def generated(self, payload: Mapping[str, Any], timeout: float) -> Any:
        """Return the outputs for a batch of prompts; `payload` has `GenerateReqInput`'s fields."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        manager = self._engine.tokenizer_manager

        async def generate() -> Any:
            return await manager.generate_request(GenerateReqInput(**payload), None).__anext__()

        return self.run("a generation", generate, timeout)

    def ask(self, name: str, fields: Mapping[str, Any], timeout: float) -> Reply:
        """Send the SGLang request with this method name, and return SGLang's reply.

        Raises:
            UnknownRequestError: this version of SGLang lacks the method.
        """
        if not hasattr(self._engine.tokenizer_manager, name):
            raise UnknownRequestError(f"this version of SGLang has no {name}")
        answer = self._submit(name, fields, timeout)
        if not isinstance(answer, tuple):
            return Reply()
        success, message, *more = answer
        return Reply(bool(success), str(message), more[0] or () if more else ())

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """See `Engine`.

        Args:
            args: the positional arguments of `sglang.Engine.generate`.
            kwargs: the keyword arguments of `sglang.Engine.generate`, and `timeout`, the seconds to
                wait for other threads' calls (by default an hour); for a stream, the timeout
                applies to each item.

        Raises:
            ConfigError: the timeout is not a positive number.
            EngineTimeoutError: another thread's call did not end in time.
            InvalidStateError: the engine's event loop is already running.
        """
        timeout = kwargs.pop("timeout", GENERATION_SECONDS)
        check_timeout(timeout)
        with self._idle(timeout):
            result = self._engine.generate(*args, **kwargs)
        return self._stream(iter(result), timeout) if kwargs.get("stream") else result

    def _submit(
        self, name: str, fields: Mapping[str, Any], timeout: float, rid: str | None = None
    ) -> Any:
        from sglang.srt.managers import io_struct

        request = getattr(io_struct, _REQUESTS[name])(**fields)
        if rid is not None:
            request.rid = rid
        method = getattr(self._engine.tokenizer_manager, name)

        async def submit() -> Any:
            return await method(request)

        return self.run(name.replace("_", " "), submit, timeout)

    def _abort(self, each: Sequence[Mapping[str, Any]], timeout: float) -> None:
        async def abort() -> None:
            for chosen in each:
                self._engine.tokenizer_manager.abort_request(**chosen)

        self.run("an abort", abort, timeout)

    def _stream(self, items: Iterator[Any], timeout: float) -> Iterator[Any]:
        end = object()
        while True:
            with self._idle(timeout):  # not locked between items, because the caller may be slow
                item = next(items, end)
            if item is end:
                return
            yield item

    @contextlib.contextmanager
    def _idle(self, timeout: float) -> Iterator[None]:
        """Exclude other threads from driving the event loop."""
        with self._driving.passed(timeout, lambda: late_generation(timeout)):
            self._check_idle()
            yield

    def _check_idle(self) -> None:
        if self._engine.loop.is_running():
            raise InvalidStateError(
                "the engine cannot generate now, because its event loop is already running: either "
                "a finalizer or a signal handler interrupted this thread in another call, or "
                "another caller drives the loop; generate after that call"
            )

    def run(self, what: str, work: Callable[[], Coroutine[Any, Any, Any]], timeout: float) -> Any:
        """Run a coroutine on the engine's event loop, and return the coroutine's result.

        Args:
            what: a description of the call, for error messages.
            work: a function that returns the coroutine.
            timeout: the seconds until the coroutine is cancelled.

        Raises:
            ConfigError: the timeout is not a positive number.
            EngineTimeoutError: the coroutine did not return in time.
            EngineDiedError: one of the engine's processes exited.
            EngineError: the coroutine raised an exception. memsaver's own errors are raised
                unchanged.
            InvalidStateError: the calling thread runs an event loop.
        """
        loop: asyncio.AbstractEventLoop = self._engine.loop
        check_call(timeout, self.death(), loop)
        future = asyncio.run_coroutine_threadsafe(work(), loop)
        drive = functools.partial(self._drive, loop, future, time.monotonic() + timeout)
        return result_of(future, what, timeout, self.death, wait=drive)

    def _drive(
        self,
        loop: asyncio.AbstractEventLoop,
        future: concurrent.futures.Future[Any],
        deadline: float,
        seconds: float,
    ) -> None:
        """Run `loop` until `future` is done, the deadline passes, or an engine process exits.

        Waits for `seconds` if another thread drives the loop; other threads may start or stop
        driving the loop at any time.
        """

        async def watch() -> None:
            answer = asyncio.wrap_future(future)
            while not (answer.done() or self.death()) and time.monotonic() < deadline:
                await asyncio.wait([answer], timeout=seconds)
            if answer.done() and not answer.cancelled():
                answer.exception()  # otherwise asyncio logs that the exception was never retrieved

        if loop.is_closed():
            future.cancel()
            return
        with contextlib.suppress(_DrivenError), self._driving.passed(0, _DrivenError):
            if loop.is_running():
                raise _DrivenError
            watching = watch()
            try:
                loop.run_until_complete(watching)
            except RuntimeError:  # another caller has just started the loop
                watching.close()
                time.sleep(0.001)
            return
        concurrent.futures.wait([future], seconds)

    def death(self) -> str:
        """Describe an engine process that has ended; "" if none is known to have ended."""
        watchdog = getattr(self._engine.tokenizer_manager, "_subprocess_watchdog", None)
        return death_among(getattr(watchdog, "_processes", ()))
