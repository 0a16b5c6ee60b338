"""An `AsyncLLM` of this process as an `Engine`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from memsaver._runtime.timeouts import check_timeout
from memsaver.errors import ConfigError, MemsaverError

from ..engine.errors import EngineDiedError, EngineError, EngineTimeoutError
from ..engine.interface import Request, Sample
from ..engine.loops import check_outside_loop
from .link import GENERATION_SECONDS, Link
from .local import arguments_of, death_of, has_plugin, result_of
from .samples import prompt_of, sample_of, sampling_of, unique_name

__all__ = ["AsyncEngine"]

Result = TypeVar("Result")

_POLL_SECONDS = 0.05
_ABORT_SECONDS = 5.0  # to abort a generation, after the generation's own timeout


class AsyncEngine(Link):
    """An `AsyncLLM` of this process. Any thread except that of the engine's event loop.

    Args:
        engine: the AsyncLLM.
        loop: its event loop, which another thread runs; None means the loop in which the AsyncLLM
            was created or first used.

    Raises:
        ConfigError: the AsyncLLM has no event loop yet.
    """

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop | None = None) -> None:
        handler = engine.output_handler
        if loop is None and handler is None:
            raise ConfigError(
                "the AsyncLLM has no event loop yet: create it inside the loop that uses it"
            )
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop = handler.get_loop() if loop is None else loop

    @property
    def engine(self) -> Any:
        """The `AsyncLLM`."""
        return self._engine

    def has_plugin(self, timeout: float) -> bool:
        """See `Link`."""
        return has_plugin()

    def rpc(self, method: str, arguments: Sequence[Any], timeout: float) -> list[Any]:
        """See `Link`."""
        call = self._engine.collective_rpc
        return list(self.run(method, lambda: call(method, timeout, tuple(arguments)), timeout))

    def call(self, name: str, arguments: Mapping[str, Any], timeout: float) -> Any:
        """See `Link`."""
        engine = self._engine
        calls = {
            "sleep": engine.sleep,
            "wake_up": engine.wake_up,
            "reset_prefix_cache": engine.reset_prefix_cache,
            "reset_mm_cache": engine.reset_mm_cache,
            "pause": engine.pause_generation,
            "unpause": engine.resume_generation,
            "abort": self._abort,
        }
        return self.run(name, lambda: calls[name](**arguments), timeout)

    def plain_arguments(self, timeout: float) -> dict[str, Any]:
        """See `Link`."""
        return arguments_of(self._engine.vllm_config)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """See `Engine`. Return the last output of `AsyncLLM.generate`, whose arguments it has.

        Args:
            args: the arguments.
            kwargs: the arguments, and `timeout`: seconds for the call, by default an hour.
                `request_id` may be missing.
        """
        timeout = kwargs.pop("timeout", GENERATION_SECONDS)
        if len(args) < 3:
            kwargs.setdefault("request_id", unique_name())
        return self.run("a generation", lambda: self._last(*args, **kwargs), timeout)

    def samples(self, requests: Sequence[Request], timeout: float) -> list[Sample]:
        """See `Link`."""
        name = unique_name()
        ids = [f"{name}-{number}" for number in range(len(requests))]
        given = [(prompt_of(one), sampling_of(one)) for one in requests]

        async def generate() -> list[Any]:
            each = (self._last(*one, rid) for one, rid in zip(given, ids, strict=True))
            return list(await asyncio.gather(*each))

        try:
            outputs = self.run("a generation", generate, timeout)
        except BaseException:
            with contextlib.suppress(MemsaverError):
                self.run("an abort", lambda: self._engine.abort(ids), _ABORT_SECONDS)
            raise
        return [sample_of(output) for output in outputs]

    async def _last(self, *args: Any, **kwargs: Any) -> Any:
        output = None
        async for output in self._engine.generate(*args, **kwargs):  # noqa: B007
            pass
        return output

    async def _abort(self) -> None:
        processor = self._engine.output_processor
        ids = [*processor.request_states, *getattr(processor, "parent_requests", ())]
        if ids:
            await self._engine.abort(ids, internal=True)

    def run(
        self, what: str, work: Callable[[], Coroutine[Any, Any, Result]], timeout: float
    ) -> Result:
        """Run a coroutine on the engine's event loop, and return its result.

        Args:
            what: a description of the call, for errors.
            work: returns the coroutine.
            timeout: seconds until the coroutine is cancelled.

        Raises:
            ConfigError: the timeout is not a positive number.
            EngineTimeoutError: the coroutine did not return in time.
            EngineDiedError: one of the engine's processes ended.
            EngineError: the coroutine raised. memsaver's own errors are raised unchanged.
            InvalidStateError: the calling thread runs an event loop.
        """
        check_timeout(timeout)
        check_outside_loop()
        if self._loop.is_closed():
            raise EngineError("the engine was shut down")
        if ended := self.death():
            raise EngineDiedError(f"the engine is dead: {ended}")

        async def submit() -> Result:
            return await work()

        done = asyncio.run_coroutine_threadsafe(submit(), self._loop)
        deadline = time.monotonic() + timeout
        while not done.done() and time.monotonic() < deadline and not self.death():
            concurrent.futures.wait([done], min(_POLL_SECONDS, deadline - time.monotonic()))
        if not done.done():
            done.cancel()
            if ended := self.death():
                raise EngineDiedError(f"the engine died before it answered {what}: {ended}")
            raise EngineTimeoutError(
                f"the engine did not answer {what} within {timeout:.3g} s; it may be dead or busy, "
                "or no thread runs its event loop"
            )
        return result_of(done, what, self.death)

    def death(self) -> str:
        """See `Backend`."""
        return death_of(self._engine.engine_core)
