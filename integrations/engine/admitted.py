"""Requests that an engine's integration sends after `Admission` has admitted them.

The engine's own processes check each request again. If they refuse a request because a release
arrived first, memsaver resends the request or raises the same error as `Admission`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from typing import Any, Protocol, TypeVar

from .admission import EVERYTHING, Admission
from .errors import EngineAsleepError
from .refusals import refused

__all__ = ["RETRY_SECONDS", "Generation", "call", "generation", "repeats"]

RETRY_SECONDS = 0.05

_Result = TypeVar("_Result")


class Generation(Protocol):
    """A generation, an embedding, or another request whose outputs an engine streams."""

    @property
    def ids(self) -> Collection[str]:
        """The names that a caller can use to abort the request."""

    async def is_gone(self) -> bool:
        """Return whether the client has disconnected. May raise an error if the engine exited."""

    def send(self) -> AsyncGenerator[Any, None]:
        """Send the request, and return its outputs. Raises `EngineAsleepError` if refused."""

    def refusal_in(self, output: Any) -> EngineAsleepError | None:
        """Return the refusal in the first output, or None."""

    def refused_part(self, output: Any) -> Generation | None:
        """Return the part of the request that a later output refuses, so that it can be sent again.

        Returns:
            The refused part if it has no earlier outputs; otherwise, None.
        """

    async def take_back(self, deadline: float) -> None:
        """Prepare a refused request to be sent again.

        If the engine has received parts of the request, aborts these parts inside
        `Admission.own_aborts`.
        """


async def generation(
    admission: Admission, what: str, request: Generation
) -> AsyncGenerator[Any, None]:
    """Admit a generation, send it, and yield its outputs.

    Args:
        admission: the engine's `Admission`.
        what: the request's operation, for the error message.
        request: the generation.

    Raises:
        EngineAsleepError: see `Admission.admit`.
        ClientGoneError: the client has disconnected.
        RequestAbortedError: a caller aborted the request, or a part of it, before the engine
            accepted the request.
    """
    deadline = admission.deadline()

    async def is_gone() -> bool:
        admission.check_aborted(request)
        return await request.is_gone()

    with contextlib.ExitStack() as abortable:  # the request, then its refused parts
        abortable.enter_context(admission.abortable(request))
        while True:
            try:
                await admission.admit(EVERYTHING, what, deadline=deadline, is_gone=is_gone)
                admission.check_aborted(request)
            except EngineAsleepError as error:
                raise refused(error) from error.__cause__
            refusal, begun, parts = None, False, list[tuple[Generation, contextlib.ExitStack]]()
            outputs = request.send()
            try:
                async for output in outputs:
                    if not begun:
                        refusal = request.refusal_in(output)
                        if refusal is not None:
                            break
                    elif repeats(admission) and (part := request.refused_part(output)) is not None:
                        held = abortable.enter_context(contextlib.ExitStack())
                        held.enter_context(admission.abortable(part, request))
                        parts.append((part, held))
                        continue
                    begun = True
                    yield output
            except EngineAsleepError as error:
                if begun:
                    raise
                refusal = error
            finally:
                await outputs.aclose()
            if refusal is None:
                break
            await request.take_back(deadline)
            await _again(admission, what, refusal, deadline)
            admission.check_aborted(request)
        for part, held in parts:
            admission.check_aborted(part)
            held.close()  # the part's own generation begins now, and is abortable again
            async for output in generation(admission, what, part):
                yield output


async def call(
    admission: Admission,
    needs: frozenset[str],
    what: str,
    send: Callable[[], Awaitable[_Result]],
    refusal_in: Callable[[_Result], EngineAsleepError | None],
    *,
    reads: bool = True,
    is_gone: Callable[[], Awaitable[bool]] | None = None,
) -> _Result:
    """Admit a request with a single result, send it, and return the result.

    Args:
        admission: the engine's `Admission`.
        needs: the tags that the request needs.
        what: the request's operation, for the error message.
        send: a function that sends the request, and can raise `EngineAsleepError`.
        refusal_in: a function that returns the refusal in a result, or None.
        reads: see `Admission.admit`.
        is_gone: see `Admission.admit`.

    Raises:
        EngineAsleepError, ClientGoneError: see `Admission.admit`.
    """
    deadline = admission.deadline()
    if admission.policy.sleep_after:
        # The engine may have released memory by itself, and some refusals have no text.
        await admission.refresh()
    while True:
        try:
            await admission.admit(needs, what, deadline=deadline, reads=reads, is_gone=is_gone)
        except EngineAsleepError as error:
            raise refused(error) from error.__cause__
        try:
            result = await send()
            refusal = refusal_in(result)
            if refusal is None:
                return result
        except EngineAsleepError as error:
            refusal = error
        await _again(admission, what, refusal, deadline)


def repeats(admission: Admission | None) -> bool:
    """Return whether requests refused by the engine's processes are sent again."""
    return admission is not None and admission.policy.when_asleep != "refuse"


async def _again(
    admission: Admission, what: str, refusal: EngineAsleepError, deadline: float
) -> None:
    """Record a refusal. Wait if the request may be sent again; otherwise, raise an error."""
    admission.learn(refusal.tags)
    if not repeats(admission) or asyncio.get_running_loop().time() + RETRY_SECONDS > deadline:
        admission.report(what, refusal)
        raise refused(refusal)
    await asyncio.sleep(RETRY_SECONDS)
