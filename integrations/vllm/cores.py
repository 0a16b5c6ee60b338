"""Call engine cores from vLLM's clients to handle requests to a sleeping engine.

A client is the object through which vLLM's `AsyncLLM` or `LLMEngine` calls its engine core, in the
same process or in another process. With data parallelism, a client has several engine cores.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from memsaver.errors import MemsaverError

from ..engine.fields import Fields, parsed
from ..engine.messages import Failure, raisable
from ..engine.tags import RELEASE_ORDER

__all__ = [
    "Memory",
    "alive",
    "error_from",
    "memory_of",
    "memory_of_async",
    "rpc_on_all_cores",
]

_METHOD = "memsaver_memory"
_LOOK_SECONDS = 0.5
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Memory:
    """The memory state of all cores of an engine.

    Attributes:
        released: the tags that are released on at least one core.
        lost: the tags that lack contents while memory is released; see `guard.Guard`.
        is_others: whether an allocator other than memsaver has released memory.
        errors: the last errors of releases and wake-ups, if they were queried.
    """

    released: frozenset[str]
    lost: frozenset[str]
    is_others: bool
    errors: tuple[MemsaverError, ...]

    @classmethod
    def of(cls, answers: Iterable[str]) -> Memory:
        """Read the cores' answers. Raises `EngineError` for an invalid answer."""
        released: set[str] = set()
        lost: set[str] = set()
        is_others = False
        failures: list[Failure | None] = []
        for answer in answers:
            read = Fields(parsed(answer, "an engine core's memory"), "an engine core's memory")
            released.update(read.texts("released", RELEASE_ORDER))
            lost.update(read.texts("lost", RELEASE_ORDER))
            is_others = is_others or read.flag("other")
            failures.extend(map(Failure.from_fields, read.each("failures")))
        errors = tuple(raisable(failure) for failure in failures if failure is not None)
        return cls(frozenset(released), frozenset(lost), is_others, errors)


def memory_of(client: Any, touch: bool = False, failed: bool = False) -> Memory:
    """Query the engine core of an `LLMEngine`'s client; see `memsaver_memory` for the arguments."""
    core = getattr(client, "engine_core", None)
    if core is not None:
        return Memory.of([core.memsaver_memory(touch, failed)])
    return Memory.of([client.call_utility(_METHOD, touch, failed)])


async def memory_of_async(client: Any, touch: bool = False, failed: bool = False) -> Memory:
    """Query all engine cores of an `AsyncLLM`'s client; see `memory_of`."""
    return Memory.of(await _on_all_cores(client, _METHOD, touch, failed))


async def rpc_on_all_cores(
    client: Any, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None
) -> list[Any]:
    """Call collective_rpc on all engine cores of an `AsyncLLM`'s client; return all rows."""
    rows = await _on_all_cores(client, "collective_rpc", method, timeout, args, kwargs)
    return [row for core in rows for row in core]


async def _on_all_cores(client: Any, method: str, *args: Any) -> list[Any]:
    call = client._call_utility_async  # `call_utility_async` returns the first core's answer
    return await asyncio.gather(*(call(method, *args, engine=one) for one in client.core_engines))


async def alive(engine: Any, work: Awaitable[_Result]) -> _Result:
    """Return the result of a call to an `AsyncLLM`'s engine cores; raise an error if a core exits.

    vLLM's own call waits indefinitely if an engine core exits without an answer.
    """
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=_LOOK_SECONDS)
            if not task.done() and engine.errored:
                raise engine.dead_error
        return task.result()
    finally:
        task.cancel()


def error_from(error: Exception, memory: Memory) -> Exception:
    """Return the original error of a failed call; vLLM sends only the error's text."""
    if isinstance(error, MemsaverError):
        return error
    # The errors in `memory` may belong to earlier calls.
    known = (one for one in memory.errors if one.message and one.message in str(error))
    return next(known, error)
