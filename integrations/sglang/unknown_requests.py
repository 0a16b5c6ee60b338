"""Refuses requests of unknown types to a sleeping engine, in SGLang's tokenizer manager.

A scheduler's guard also refuses such a request, but cannot answer the request if the reply's type
is also unknown, so the sender would wait indefinitely. The hooks therefore query the state of the
schedulers' memory before the request is sent, and again while the request has no reply.

The hooks apply to SGLang's communicators, each of which sends requests of one type to all
schedulers and collects the replies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ..engine.admission import Admission
from ..engine.errors import EngineAsleepError
from ..engine.refusals import asleep_error, refused
from ..engine.shared_query import retrieve
from .admissions import admission_of
from .guard import is_known

__all__ = ["attach", "call", "receive"]

_SENDER = "_memsaver_sender"  # an attribute of a communicator
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class _Sender:
    """The sender of a communicator's requests.

    Attributes:
        manager: the tokenizer manager.
        lock: a lock that serializes requests of unknown types, so that each request is sent
            immediately after its check, and requests that `_uncancelled` sends.
    """

    manager: Any
    lock: asyncio.Lock


def attach(result: Any, manager: Any, *_: Any) -> Any:
    """Store the manager in the communicators after `TokenizerControlMixin.init_communicators`."""
    for communicator in list(vars(manager).values()):
        if hasattr(communicator, "handle_recv"):
            setattr(communicator, _SENDER, _Sender(manager, asyncio.Lock()))
    return result


async def call(original: Callable[..., Awaitable[Any]], communicator: Any, obj: Any) -> Any:
    """Wrap `FanOutCommunicator.__call__`.

    Raises:
        EngineAsleepError: memory is released, and the request is of an unknown type. The request
            was not sent, or memory was released after the request was sent and no scheduler has
            replied.
    """
    sender: _Sender | None = vars(communicator).get(_SENDER)
    admission = None if sender is None else admission_of(sender.manager)
    kind = type(obj).__name__
    if sender is None or admission is None or obj is None or is_known(kind):
        if sender is None or not _is_blocked_by_cancellation(communicator):
            return await original(communicator, obj)
        return await _uncancelled(original, communicator, obj, sender.lock)
    what = f"process {kind}"
    async with sender.lock:
        if await admission.refresh():
            raise _refusal(admission, what)
        replies = asyncio.ensure_future(original(communicator, obj))
        try:
            while not await _is_done(replies):
                # Schedulers reply in order: a reply to the request precedes the reply to the query.
                if await admission.refresh() and not await _is_done(replies):
                    await _end(communicator, replies)
                    raise _refusal(admission, what)
            return replies.result()
        except asyncio.CancelledError:
            await _end(communicator, replies)
            raise
        finally:
            replies.cancel()


def receive(original: Callable[..., None], communicator: Any, reply: Any) -> None:
    """Wrap `FanOutCommunicator.handle_recv`: ignore a reply to a request that `call` has ended.

    SGLang 0.5.12 exits if a reply arrives for which no request waits.
    """
    if getattr(communicator, "_result_values", ()) is not None:
        original(communicator, reply)


def _is_blocked_by_cancellation(communicator: Any) -> bool:
    """Return whether later requests wait indefinitely after the cancellation of a request.

    SGLang 0.5.16 and newer have no queue of waiting requests.
    """
    return hasattr(communicator, "_ready_queue") and communicator._mode == "queueing"


async def _uncancelled(
    original: Callable[..., Awaitable[Any]], communicator: Any, obj: Any, lock: asyncio.Lock
) -> Any:
    """Send a request, and wait for its replies, even if the caller is cancelled in the meantime.

    If the caller is cancelled before the request is sent, the request is not sent.
    """
    await lock.acquire()
    replies = asyncio.ensure_future(original(communicator, obj))
    replies.add_done_callback(lambda _: lock.release())
    replies.add_done_callback(retrieve)
    return await asyncio.shield(replies)


async def _is_done(replies: asyncio.Future[Any]) -> bool:
    return bool((await asyncio.wait([replies], timeout=_POLL_SECONDS))[0])


async def _end(communicator: Any, replies: asyncio.Future[Any]) -> None:
    """End the communicator's request, so that later requests do not wait for its replies."""
    if communicator._result_event is not None:
        communicator._result_event.set()
    await _is_done(replies)


def _refusal(admission: Admission, what: str) -> EngineAsleepError:
    error = asleep_error(admission.released, what)
    admission.report(what, error)
    return refused(error)
