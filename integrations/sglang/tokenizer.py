"""Release and resume in SGLang's tokenizer manager, with the schedulers' answers or errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Collection, Sequence
from typing import Any

from memsaver.errors import MemsaverError

from ..engine.admission import EVERYTHING
from ..engine.messages import Answer
from ..engine.shared_query import retrieve
from ..engine.tags import WEIGHTS
from . import handlers, undoing
from .admissions import admission_of, memory_tags, sent, without_backup
from .protocol import FORGIVING, IDLE, REWRITTEN, STRICT, UNDO, UNDO_REWRITTEN

__all__ = ["request_release", "request_resume"]

_WEIGHTS = frozenset({WEIGHTS})
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

    With several replicas, the work continues even if the caller is cancelled, because otherwise the
    replicas could end in different states.
    """
    work = _changed(manager, operation, communicator, obj)
    if undoing.has_replicas(manager):
        task = asyncio.ensure_future(work)
        task.add_done_callback(retrieve)
        answers, error = await asyncio.shield(task)
    else:
        answers, error = await work
    if error is not None:
        _logger.warning("a %s of memory failed: %s", operation, str(error))
        raise error
    return answers


async def _changed(
    manager: Any, operation: str, communicator: Any, obj: Any
) -> tuple[Sequence[Answer], MemsaverError | None]:
    admission = admission_of(manager)
    if admission is None:
        return await sent(manager, operation, communicator, obj)
    async with admission.changing:
        tags = memory_tags(_asked(obj))
        if operation == "release":
            if (busy := await undoing.busy_replica(manager, tags)) is not None:
                return (), busy
            if tags - admission.released >= _WEIGHTS:
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
