"""An `AsyncLLM` in this process as an `Engine`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from memsaver.errors import ConfigError, MemsaverError

from ..engine.interface import GENERATION_SECONDS, Request, Sample
from ..engine.local_calls import check_call, result_of
from ..engine.outputs import request_ids
from .local import ERRORS, Local
from .samples import prompt_of, sample_of, sampling_of

__all__ = ["AsyncEngine"]

Result = TypeVar("Result")

_ABORT_SECONDS = 5.0  # to abort a generation, after the generation's own timeout


class AsyncEngine(Local):
    """An `AsyncLLM` in this process.

    Any thread may make calls, except the thread of the engine's event loop.

    Args:
        engine: the AsyncLLM.
        loop: the AsyncLLM's event loop, which must run on another thread; None means the loop in
            which the AsyncLLM was created or first used.

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

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the last output of `AsyncLLM.generate` for these arguments; see `Engine`.

        Args:
            args: the arguments.
            kwargs: the keyword arguments, and `timeout`, the time limit for the call in seconds
                (one hour by default). `request_id` may be omitted.
        """
        timeout = kwargs.pop("timeout", GENERATION_SECONDS)
        if len(args) < 3:
            kwargs.setdefault("request_id", *request_ids(1))
        return self.run("a generation", lambda: self._last(*args, **kwargs), timeout)

    def samples(self, requests: Sequence[Request], timeout: float) -> list[Sample]:
        """See `Link`."""
        ids = request_ids(len(requests))
        arguments = [(prompt_of(one), sampling_of(one)) for one in requests]

        async def generate() -> list[Any]:
            each = (self._last(*one, rid) for one, rid in zip(arguments, ids, strict=True))
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
        await self._engine.abort(self.unfinished(), internal=True)  # [] aborts held requests

    def run(
        self, what: str, work: Callable[[], Coroutine[Any, Any, Result]], timeout: float
    ) -> Result:
        """See `Local`. Run a coroutine on the engine's event loop."""
        check_call(timeout, self.death(), self._loop)

        async def submit() -> Result:
            return await work()

        done = asyncio.run_coroutine_threadsafe(submit(), self._loop)
        return result_of(done, what, timeout, self.death, kinds=ERRORS)
