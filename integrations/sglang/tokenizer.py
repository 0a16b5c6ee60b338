"""Sends releases and resumes from SGLang's tokenizer manager; returns answers or raises errors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Collection, Sequence
from typing import Any

from memsaver.errors import MemsaverError

from ..engine.admission import EVERYTHING, Admission
from ..engine.messages import Answer
from ..engine.shared_query import retrieve
from ..engine.tags import WEIGHTS
from . import handlers, undoing
from .admissions import admission_of, memory_tags, sent, states_from, without_backup
from .places import has_replicas
from .protocol import FORGIVING, IDLE, REWRITTEN, STRICT, UNDO, UNDO_REWRITTEN

__all__ = ["request_release", "request_resume"]

_WEIGHTS = frozenset({WEIGHTS})
_GRACE_SECONDS = 30.0  # for a request whose caller was cancelled
_Result = tuple[Sequence[Answer], MemsaverError | None]
_logger = logging.getLogger("memsaver.sglang")


def request_release(manager: Any, obj: Any, request: Any = None) -> Awaitable[Sequence[Answer]]:
    """Replace `TokenizerControlMixin.release_memory_occupation`; see `_change`."""
    _mark(obj)
    return _change(manager, "release", manager.release_memory_occupation_communicator, obj)


def request_resume(manager: Any, obj: Any, request: Any = None) -> Awaitable[Sequence[Answer]]:
    """Replace `TokenizerControlMixin.resume_memory_occupation`; see `_change`."""
    _mark(obj)
    return _change(manager, "resume", manager.resume_memory_occupation_communicator, obj)


def _mark(obj: Any) -> None:
    """Mark a request as STRICT if SGLang reports states, unless memsaver's controller sends it.

    A client's request must be marked neither as IDLE, because a scheduler would not reply to it,
    nor as a request that undoes another one.
    """
    if obj.rid in (IDLE, UNDO, UNDO_REWRITTEN):
        obj.rid = None
    if handlers.reports_states() and obj.rid not in (FORGIVING, REWRITTEN):
        obj.rid = STRICT


async def _change(manager: Any, operation: str, communicator: Any, obj: Any) -> Sequence[Answer]:
    """Send a release or a resume; return the schedulers' answers, or log and raise an error.

    With several replicas, a request that was sent is completed or undone even if the caller is
    cancelled, because otherwise the replicas could end in different states. A scheduler that does
    not answer delays later calls by up to _GRACE_SECONDS.
    """
    admission = admission_of(manager)
    if admission is None:
        answers, error = _logged(operation, await sent(manager, operation, communicator, obj))
    else:
        async with contextlib.AsyncExitStack() as lock:
            await lock.enter_async_context(admission.changing)
            tags = memory_tags(_asked(obj))
            separate = has_replicas(manager)
            if separate and operation == "release":
                busy = undoing.busy_replica(await states_from(manager), tags)
                if busy is not None:
                    _logged(operation, ((), busy))
                    raise busy
            work = _sent(manager, admission, operation, communicator, obj, tags)
            if separate:  # the task owns the lock from now on
                work = _completed(operation, lock.pop_all(), work)
            answers, error = await work
    if error is not None:
        raise error
    return answers


def _logged(operation: str, result: _Result) -> _Result:
    """Return a result; if it contains an error, log the error."""
    if result[1] is not None:
        _logger.warning("a %s of memory failed: %s", operation, str(result[1]))
    return result


async def _completed(
    operation: str, lock: contextlib.AsyncExitStack, work: Awaitable[_Result]
) -> _Result:
    """Run work that owns a lock, for at most _GRACE_SECONDS after the caller is cancelled."""

    async def whole() -> _Result:
        async with lock:
            try:
                return await work
            except asyncio.CancelledError:
                _logger.warning("a %s of memory was not answered by all replicas", operation)
                raise

    task = asyncio.ensure_future(whole())
    task.add_done_callback(retrieve)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        asyncio.get_running_loop().call_later(_GRACE_SECONDS, task.cancel)
        raise


async def _sent(
    manager: Any,
    admission: Admission,
    operation: str,
    communicator: Any,
    obj: Any,
    tags: frozenset[str],
) -> _Result:
    """Send a request, and record the released tags. The caller owns `admission.changing`."""
    if operation == "release" and tags - admission.released >= _WEIGHTS:
        admission.without_backup = without_backup(manager, obj)
    try:
        answers, error = _logged(operation, await sent(manager, operation, communicator, obj))
    except BaseException:
        # Even if the caller was cancelled, the schedulers may have received the request.
        if operation == "release":
            admission.learn(admission.released | tags)
        raise
    if any(not _WEIGHTS.isdisjoint(answer.lost) for answer in answers):
        admission.without_backup = frozenset(_WEIGHTS)
    if answers:
        admission.learn(memory_tags(tag for answer in answers for tag in answer.released))
    else:
        before = admission.released
        admission.learn(before | tags if operation == "release" else before - tags)
    return answers, error


def _asked(obj: Any) -> frozenset[str]:
    """Return the known tags that a request names, or all known tags if it names none.

    The schedulers reject a request whose tags are not a list of known tags.
    """
    tags = getattr(obj, "tags", None) or EVERYTHING
    is_listed = isinstance(tags, Collection) and not isinstance(tags, str)
    return frozenset(tag for tag in EVERYTHING if is_listed and tag in tags)
