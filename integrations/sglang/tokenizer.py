"""Release and resume in SGLang's tokenizer manager, with the schedulers' answers or errors."""

from __future__ import annotations

import asyncio
import contextlib
import functools
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
from .protocol import FORGIVING, IDLE, REWRITTEN, STRICT, UNDO, UNDO_REWRITTEN

__all__ = ["request_release", "request_resume"]

_WEIGHTS = frozenset({WEIGHTS})
_GRACE_SECONDS = 30.0  # for a request whose caller was cancelled
_Result = tuple[Sequence[Answer], MemsaverError | None]
_logger = logging.getLogger("memsaver.sglang")


def request_release(manager: Any, obj: Any, request: Any = None) -> Awaitable[Sequence[Answer]]:
    """Replace `TokenizerControlMixin.release_memory_occupation`; return the answers or raise."""
    _mark(obj)
    return _change(manager, "release", manager.release_memory_occupation_communicator, obj)


def request_resume(manager: Any, obj: Any, request: Any = None) -> Awaitable[Sequence[Answer]]:
    """Replace `TokenizerControlMixin.resume_memory_occupation`; return the answers, or raise."""
    _mark(obj)
    return _change(manager, "resume", manager.resume_memory_occupation_communicator, obj)


def _mark(obj: Any) -> None:
    """Mark a request as STRICT if SGLang reports states, unless memsaver's controller sends it.

    A client's request must not be marked as IDLE, because a scheduler would not reply to it, or as
    one that undoes another request.
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
        return _checked(operation, *await sent(manager, operation, communicator, obj))
    async with contextlib.AsyncExitStack() as lock:
        await lock.enter_async_context(admission.changing)
        tags = memory_tags(_asked(obj))
        if not undoing.has_replicas(manager):
            work = _sent(manager, admission, operation, communicator, obj)
            return _checked(operation, *await work)
        if operation == "release":
            busy = undoing.busy_replica(await states_from(manager), tags)
            if busy is not None:
                return _checked(operation, (), busy)
        task = asyncio.ensure_future(
            _whole(lock.pop_all(), _sent(manager, admission, operation, communicator, obj))
        )
    task.add_done_callback(retrieve)
    try:
        answers, error = await asyncio.shield(task)
    except asyncio.CancelledError:
        asyncio.get_running_loop().call_later(_GRACE_SECONDS, task.cancel)
        task.add_done_callback(functools.partial(_log_result, operation))
        raise
    return _checked(operation, answers, error)


def _checked(
    operation: str, answers: Sequence[Answer], error: MemsaverError | None
) -> Sequence[Answer]:
    if error is not None:
        _logger.warning("a %s of memory failed: %s", operation, str(error))
        raise error
    return answers


def _log_result(operation: str, task: asyncio.Future[_Result]) -> None:
    """Log the failure of a request whose caller was cancelled."""
    if task.cancelled():
        _logger.warning("a %s of memory was not answered by all replicas", operation)
    elif task.exception() is None and task.result()[1] is not None:
        _logger.warning("a %s of memory failed: %s", operation, task.result()[1])


async def _whole(lock: contextlib.AsyncExitStack, work: Awaitable[_Result]) -> _Result:
    async with lock:
        return await work


async def _sent(
    manager: Any, admission: Admission, operation: str, communicator: Any, obj: Any
) -> _Result:
    """Send a request, and record what is then released. The caller owns `admission.changing`."""
    tags = memory_tags(_asked(obj))
    if operation == "release" and tags - admission.released >= _WEIGHTS:
        admission.without_backup = without_backup(manager, obj)
    try:
        answers, error = await sent(manager, operation, communicator, obj)
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
