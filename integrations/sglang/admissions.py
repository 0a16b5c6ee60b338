"""Hooks in SGLang's tokenizer manager for requests to a sleeping engine.

The hooks apply the policy of `settings.policy_of` before a request is sent to the schedulers. The
scheduler's own guard (`guard`) then checks the request again. If the guard refuses the request
because a release arrived first, the hooks send the request again, or raise the same error.

| policy | a request that needs released memory |
|---|---|
| refuse | raises `EngineAsleepError`; the server answers with status 503 |
| wait | is held, in order, until the memory is resumed; raises after a timeout |
| wake | resumes the memory that it needs; if too little is free, retries for a time, then raises |

A health check neither waits nor wakes the engine. An abort ends a request that is held or that a
scheduler has refused. The request raises `RequestAbortedError`, and the server answers with status
400. Without `enable_memory_saver`, the hooks do nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from typing import Any

from memsaver.errors import MemsaverError

from ..engine import admitted
from ..engine.admission import EVERYTHING, Admission
from ..engine.errors import EngineAsleepError
from ..engine.messages import Answer, SchedulerState, error_of
from ..engine.refusals import asleep_in, refused
from ..engine.shared_query import SharedQuery
from ..engine.tags import GRAPH, WEIGHTS
from . import settings, undoing
from .places import has_replicas
from .protocol import REWRITTEN, TOUCH, answers_of, is_health_check, states_of

__all__ = [
    "abort",
    "abort_reason",
    "admission_of",
    "call",
    "discard_pending",
    "generate",
    "memory_tags",
    "release_states",
    "sent",
    "states_from",
    "without_backup",
]

# Attributes of a tokenizer manager.
_ATTRIBUTE = "_memsaver_admission"
_SCHEDULERS = "_memsaver_schedulers"
_WEIGHTS = frozenset({WEIGHTS})
_logger = logging.getLogger("memsaver.sglang")


def admission_of(manager: Any) -> Admission | None:
    """Return the `Admission` of a tokenizer manager; None if the engine has no memory saver."""
    found = vars(manager).get(_ATTRIBUTE, False)
    if found is False:
        found = _made(manager)
        setattr(manager, _ATTRIBUTE, found)
    return found  # type: ignore[no-any-return]


def _made(manager: Any) -> Admission | None:
    arguments = manager.server_args
    if not getattr(arguments, "enable_memory_saver", False):
        return None
    schedulers = _Schedulers(manager)
    setattr(manager, _SCHEDULERS, schedulers)
    return Admission(settings.policy_of(manager), schedulers, without_backup(manager))


async def states_from(manager: Any) -> list[SchedulerState]:
    """Query the schedulers of a manager with an `Admission`; return [] if the query fails."""
    return await _schedulers_of(manager).query.answer() or []


def _schedulers_of(manager: Any) -> _Schedulers:
    found: _Schedulers = getattr(manager, _SCHEDULERS)
    return found


def without_backup(manager: Any, release: Any = None) -> frozenset[str]:
    """Return the tags whose contents `release` discards; None stands for an arbitrary release."""
    kept = getattr(manager.server_args, "enable_weights_cpu_backup", False)
    is_rewritten = getattr(release, "rid", None) == REWRITTEN
    return frozenset() if kept and not is_rewritten else frozenset(_WEIGHTS)


class _Schedulers:
    """See `Sleeper`."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        # After a cancelled query, SGLang 0.5.12 waits indefinitely in all later queries.
        self.query = SharedQuery(self._states, _logger)
        self._touch = SharedQuery(self._restart_idle_time, _logger)

    async def _states(self) -> list[SchedulerState]:
        return states_of(await self._manager.get_internal_state())

    async def _restart_idle_time(self) -> None:
        from sglang.srt.managers.io_struct import GetInternalStateReq

        request = GetInternalStateReq()
        request.rid = TOUCH
        self._manager.auto_create_handle_loop()
        await self._manager.get_internal_state_communicator(request)

    async def stay_awake(self) -> None:
        """Restart the idle timers of all replicas, so none falls asleep before the next request.

        Without this call, a replica could fall asleep between the query of its state and a request
        that all replicas must process together, such as a broadcast of weights.
        """
        await self._touch.answer()

    async def released(self) -> frozenset[str] | None:
        states = await self.query.answer()
        if not states:
            return None
        if (admission := admission_of(self._manager)) is not None:
            admission.lost = frozenset(tag for state in states for tag in state.lost)
            admission.without_backup = admission.lost
        return memory_tags(tag for state in states for tag in state.released)

    async def resume(self, tags: Collection[str]) -> frozenset[str]:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        _logger.info("a request wakes the engine: resuming %s", ", ".join(tags))
        request = ResumeMemoryOccupationReqInput(tags=list(tags))
        communicator = self._manager.resume_memory_occupation_communicator
        answers, error = await sent(self._manager, "resume", communicator, request)
        if error is not None:
            raise error
        if not answers:  # SGLang's own handlers, which have resumed all of the tags
            admission = admission_of(self._manager)
            return admission.released.difference(tags) if admission is not None else frozenset()
        return memory_tags(tag for answer in answers for tag in answer.released)


def memory_tags(released: Any) -> frozenset[str]:
    """Return the released tags that have memory; GRAPH has memory only if graphs are pausable."""
    tags = frozenset(released)
    return tags if settings.graphs_are_pausable() else tags - {GRAPH}


async def sent(
    manager: Any, operation: str, communicator: Any, obj: Any
) -> tuple[Sequence[Answer], MemsaverError | None]:
    """Send a release or a resume to all replicas; if it fails on one, undo it on the others."""
    manager.auto_create_handle_loop()
    answers: Sequence[Answer] = answers_of(await communicator(obj))
    error = error_of(answers)
    if error is not None:
        answers, then = await undoing.undo(manager, operation, obj, answers)
        error.message += then
    return answers, error


# --- control requests -----------------------------------------------------------------------------


def call(what: str, *, reads: bool = True) -> Callable[..., Awaitable[Any]]:
    """Return a hook around a control request that needs the weights.

    Args:
        what: the name of the request's operation, for error messages.
        reads: whether the request reads the weights; False if it only overwrites them.
    """

    async def hook(original: Callable[..., Awaitable[Any]], manager: Any, *args: Any) -> Any:
        admission = admission_of(manager)
        if admission is None:
            return await original(manager, *args)
        if admission.policy.sleep_after and has_replicas(manager):
            await _schedulers_of(manager).stay_awake()
        return await admitted.call(
            admission,
            EVERYTHING if _captures(args) else _WEIGHTS,
            what,
            lambda: original(manager, *args),
            lambda result: asleep_in(_text_of(result)),
            reads=reads,
            is_gone=_is_gone(args[1] if len(args) > 1 else None),
        )

    return hook


def _captures(args: Any) -> bool:
    return bool(args) and bool(getattr(args[0], "recapture_cuda_graph", False))


def _text_of(result: Any) -> Any:
    """Return the message in a control method's result."""
    if isinstance(result, tuple) and len(result) > 1 and result[0] is False:
        return result[1]
    return getattr(result, "error_message", None)


def _is_gone(request: Any) -> Callable[[], Awaitable[bool]] | None:
    return getattr(request, "is_disconnected", None)


# --- generations and embeddings -------------------------------------------------------------------


def generate(original: Callable[..., Any], manager: Any, obj: Any, request: Any = None) -> Any:
    """Wrap `TokenizerManager.generate_request`, which returns an asynchronous iterator."""
    admission = admission_of(manager)
    if admission is None or is_health_check(obj):
        return original(manager, obj, request)
    if admission.policy.when_asleep == "refuse" and not admission.released:
        return original(manager, obj, request)
    what = "compute embeddings" if type(obj).__name__ == "EmbeddingReqInput" else "generate"
    return admitted.generation(admission, what, _Generation(original, manager, obj, request))


def abort(
    original: Callable[..., Any], manager: Any, rid: str = "", abort_all: bool = False
) -> Any:
    """Wrap `TokenizerManager.abort_request`: also abort requests that have not been sent."""
    admission = admission_of(manager)
    if admission is not None:
        admission.abort([rid], abort_all)
    return original(manager, rid, abort_all)


class _Generation:
    """See `admitted.Generation`.

    Args:
        original: the SGLang method.
        manager: the engine's tokenizer manager.
        obj: the SGLang request.
        request: the server's request, or None.
    """

    def __init__(self, original: Callable[..., Any], manager: Any, obj: Any, request: Any) -> None:
        self._original = original
        self._manager = manager
        self._obj = self._unsent = obj
        self._request = request
        # The client of a background request may disconnect.
        self._is_gone = _is_gone(None if getattr(obj, "background", False) else request)

    @property
    def ids(self) -> list[str]:
        return _rids_of(self._obj)

    async def is_gone(self) -> bool:
        return self._is_gone is not None and await self._is_gone()

    def send(self) -> AsyncGenerator[Any, None]:
        self._unsent = copy.copy(self._obj)  # SGLang changes the original
        return self._original(self._manager, self._obj, self._request)  # type: ignore[no-any-return]

    def refusal_in(self, output: Any) -> EngineAsleepError | None:
        return _refusal_in(output)

    def refused_part(self, output: Any) -> _RefusedPart | None:
        at = output.get("index")
        if at is None or getattr(self._obj, "parallel_sample_num", 1) > 1:
            return None
        if _refusal_in(output) is None:
            return None
        part = copy.copy(self._obj[at])
        return _RefusedPart(self._original, self._manager, part, self._request, at)

    async def take_back(self, deadline: float) -> None:
        await _discard(self._manager, self._obj, deadline)
        if getattr(self._obj, "is_single", False):
            self._unsent.rid = self._obj.rid  # the id with which the server aborts it
        self._obj = self._unsent


class _RefusedPart(_Generation):
    """One prompt of a streamed batch, which is sent again separately.

    The outputs contain the prompt's index in the batch.
    """

    def __init__(
        self, original: Callable[..., Any], manager: Any, obj: Any, request: Any, index: int
    ) -> None:
        super().__init__(original, manager, obj, request)
        self._index = index

    async def send(self) -> AsyncGenerator[Any, None]:
        async with contextlib.aclosing(super().send()) as outputs:
            async for output in outputs:
                output["index"] = self._index
                yield output


def _rids_of(obj: Any) -> list[str]:
    rids = getattr(obj, "rid", None)
    return [rids] if isinstance(rids, str) else list(rids or ())


def _refusal_in(output: Any) -> EngineAsleepError | None:
    """Return the refusal in the first output of a stream, or None."""
    try:
        reason = output["meta_info"]["finish_reason"]
        return asleep_in(reason["message"]) if reason["type"] == "abort" else None
    except (KeyError, TypeError):
        return None


async def _discard(manager: Any, obj: Any, deadline: float) -> None:
    """Abort the parts of a refused request that a scheduler accepted, and wait until they end.

    A part ends when its scheduler has answered, and SGLang then removes the part's state. The state
    must exist until then, because SGLang 0.5.12 exits if it receives an answer for a part without a
    state.
    """
    rids = _rids_of(obj)
    with _own_aborts(manager):
        for rid in rids:
            if getattr(obj, "parallel_sample_num", 1) > 1:
                manager.rid_to_state.pop(rid, None)  # never sent: the samples have their own ids
            elif rid in manager.rid_to_state:
                manager.abort_request(rid)
    now = asyncio.get_running_loop().time
    while not manager.rid_to_state.keys().isdisjoint(rids) and now() < deadline:
        await asyncio.sleep(admitted.RETRY_SECONDS)


def _own_aborts(manager: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context manager for memsaver's own aborts; see `Admission.own_aborts`."""
    admission = admission_of(manager)
    return contextlib.nullcontext() if admission is None else admission.own_aborts()


def release_states(original: Callable[..., Any], manager: Any, states: Any) -> Any:
    """Wrap `TokenizerManager._release_req_states_on_failure`, which aborts parts that were sent."""
    with _own_aborts(manager):
        return original(manager, states)


def discard_pending(original: Callable[..., Any], manager: Any, obj: Any) -> Any:
    """Wrap `TokenizerManager._discard_pending_req_states`, which discards parts that were sent.

    `_discard` aborts them if the request is sent again.
    """
    is_refused = isinstance(sys.exc_info()[1], EngineAsleepError)
    if is_refused and admitted.repeats(admission_of(manager)):
        return None
    return original(manager, obj)


async def abort_reason(
    original: Callable[..., Awaitable[Any]], manager: Any, output: Any, *args: Any
) -> Any:
    """Wrap `TokenizerManager._handle_abort_finish_reason`, which raises SGLang's own error."""
    refusal = _refusal_in(output)
    if refusal is None:
        return await original(manager, output, *args)
    from ..engine.asleep_error import AsleepError

    admission = admission_of(manager)
    if admission is not None:
        admission.learn(refusal.tags)
    is_final = not admitted.repeats(admission)
    try:
        result = await original(manager, output, *args)
    except Exception as error:
        raise (refused(refusal) if is_final else AsleepError.of(refusal)) from error
    if result is not None and is_final:
        refused(refusal)  # the first output of a stream
    return result
