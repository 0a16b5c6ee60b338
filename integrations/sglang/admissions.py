"""Hooks in SGLang's tokenizer manager for requests to a sleeping engine.

The hooks apply the policy of `settings.policy` before a request is sent to the schedulers. The
scheduler's own guard (`guard`) checks the request last: if it refuses the request, because a
release arrived first, the request is sent again, or raises the same error.

| policy | a request that needs released memory |
|---|---|
| refuse | raises `EngineAsleepError`; the server answers with status 503 |
| wait | is held, in order, until the memory is resumed; raises after a timeout |
| wake | resumes the memory that it needs; if too little is free, retries for a time, then raises |

A health check neither waits nor wakes the engine. An abort ends a held request with
`RequestAbortedError`, for which the server answers with status 400. Without
`enable_memory_saver`, the hooks do nothing.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextvars import ContextVar
from typing import Any

from memsaver.errors import MemsaverError

from ..engine.admission import EVERYTHING, Admission, RequestAbortedError, retrieve
from ..engine.errors import EngineAsleepError, EngineError
from ..engine.messages import Answer, error_of
from ..engine.refusals import asleep_in
from ..engine.tags import GRAPH, WEIGHTS
from . import settings
from .protocol import answers_of, is_health_check, states_of

__all__ = [
    "Refusal",
    "abort",
    "abort_reason",
    "admission_of",
    "call",
    "change",
    "discard_pending",
    "generate",
    "refusal_here",
]

QUERY_SECONDS = 5.0
_ATTRIBUTE = "_memsaver_admission"  # of a tokenizer manager
_HELD = "_memsaver_held"  # of a tokenizer manager: a list of `_Held`
_WEIGHTS = frozenset({WEIGHTS})
_RETRY_SECONDS = 0.05
_logger = logging.getLogger("memsaver.sglang")


class Refusal:
    """Passes the error of a refused request to the server's middleware.

    Attributes:
        error: the error; None if the request was not refused.
    """

    def __init__(self) -> None:
        self.error: EngineAsleepError | None = None


# Set by the server's middleware: SGLang's endpoints answer in several formats, without the tags.
refusal_here: ContextVar[Refusal | None] = ContextVar("memsaver_refusal", default=None)


def admission_of(manager: Any) -> Admission | None:
    """Return a tokenizer manager's `Admission`; None if the engine has no memory saver."""
    found = vars(manager).get(_ATTRIBUTE, False)
    if found is False:
        found = _made(manager)
        setattr(manager, _ATTRIBUTE, found)
    return found  # type: ignore[no-any-return]


def _made(manager: Any) -> Admission | None:
    arguments = manager.server_args
    if not getattr(arguments, "enable_memory_saver", False):
        return None
    kept = getattr(arguments, "enable_weights_cpu_backup", False)
    return Admission(settings.policy(), _Schedulers(manager), () if kept else _WEIGHTS)


class _Schedulers:
    """See `Sleeper`."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._query: asyncio.Future[Any] | None = None  # the last one

    async def released(self) -> frozenset[str] | None:
        # All requests wait for the same query, and none cancels it: after a cancelled query, SGLang
        # 0.5.12 waits without end in all later ones.
        if self._query is None or self._query.done():
            self._query = asyncio.ensure_future(self._manager.get_internal_state())
            self._query.add_done_callback(retrieve)
        query = self._query
        await asyncio.wait([query], timeout=QUERY_SECONDS)
        if not query.done():
            _logger.warning("the schedulers did not report their memory in %g s", QUERY_SECONDS)
            return None
        try:
            states = states_of(query.result())
        except EngineError as error:
            _logger.warning("the schedulers did not report their memory: %r", error)
            return None
        return _asleep(tag for state in states for tag in state.released) if states else None

    async def resume(self, tags: Collection[str]) -> frozenset[str]:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        _logger.info("a request wakes the engine: resuming %s", ", ".join(tags))
        request = ResumeMemoryOccupationReqInput(tags=list(tags))
        communicator = self._manager.resume_memory_occupation_communicator
        answers, error = await _sent(self._manager, communicator, request)
        if error is not None:
            raise error
        if not answers:  # SGLang's own handlers, which have resumed all of the tags
            admission = admission_of(self._manager)
            return admission.released.difference(tags) if admission is not None else frozenset()
        return _asleep(tag for answer in answers for tag in answer.released)


def _asleep(released: Any) -> frozenset[str]:
    """Return the released tags that have memory: without pausable graphs, GRAPH has none."""
    tags = frozenset(released)
    return tags if settings.graphs_are_pausable() else tags - {GRAPH}


async def _sent(
    manager: Any, communicator: Any, obj: Any
) -> tuple[list[Answer], MemsaverError | None]:
    manager.auto_create_handle_loop()
    answers = answers_of(await communicator(obj))
    return answers, error_of(answers)


# --- releases and resumes -------------------------------------------------------------------------


async def change(manager: Any, operation: str, communicator: Any, obj: Any) -> list[Answer]:
    """Send a release or a resume, and return the schedulers' answers, or raise their error."""
    admission = admission_of(manager)
    if admission is None:
        answers, error = await _sent(manager, communicator, obj)
    else:
        async with admission.changing():
            answers, error = await _sent(manager, communicator, obj)
            if answers:
                admission.learn(_asleep(tag for answer in answers for tag in answer.released))
            else:
                tags = _asleep(getattr(obj, "tags", None) or EVERYTHING)
                before = admission.released
                admission.learn(before | tags if operation == "release" else before - tags)
    if error is not None:
        raise error
    return answers


# --- control requests -----------------------------------------------------------------------------


def call(what: str, *, reads: bool = True) -> Callable[..., Awaitable[Any]]:
    """Return a hook around a control request that needs the weights.

    Args:
        what: the request's operation, for errors.
        reads: whether the request reads the weights; False if it only replaces them.
    """

    async def hook(original: Callable[..., Awaitable[Any]], manager: Any, *args: Any) -> Any:
        admission = admission_of(manager)
        if admission is None:
            return await original(manager, *args)
        request = args[1] if len(args) > 1 else None
        deadline = admission.deadline()
        if admission.policy.sleep_after:
            # The schedulers may have released memory by themselves, and their reply to a refused
            # `get_weights_by_name` is None, without a reason.
            await admission.refresh()
        while True:
            needs = EVERYTHING if _captures(args) else _WEIGHTS
            try:
                await admission.admit(
                    needs, what, deadline=deadline, reads=reads, is_gone=_is_gone(request)
                )
            except EngineAsleepError as error:
                raise _refused(error) from error.__cause__
            result = await original(manager, *args)
            refused = asleep_in(_text_of(result))
            if refused is None:
                return result
            await _again(admission, refused, deadline)

    return hook


def _captures(args: Any) -> bool:
    return bool(args) and bool(getattr(args[0], "recapture_cuda_graph", False))


def _text_of(result: Any) -> Any:
    """Return the message in a control method's result."""
    if isinstance(result, tuple) and len(result) > 1 and result[0] is False:
        return result[1]
    return getattr(result, "error_message", None)


def _repeats(admission: Admission | None) -> bool:
    """Return whether requests that a scheduler refuses are sent again."""
    return admission is not None and admission.policy.when_asleep != "refuse"


async def _again(admission: Admission, refused: EngineAsleepError, deadline: float) -> None:
    """Record a scheduler's refusal. Wait if the request may be sent again, otherwise raise."""
    admission.learn(refused.tags)
    if not _repeats(admission) or asyncio.get_running_loop().time() + _RETRY_SECONDS > deadline:
        raise _refused(refused)
    await asyncio.sleep(_RETRY_SECONDS)


def _error_of(error: EngineAsleepError) -> EngineAsleepError:
    from .asleep_error import AsleepError

    return AsleepError.of(error)


def _refused(error: EngineAsleepError) -> EngineAsleepError:
    """Return the error of a request that is not sent again, and record it for the middleware."""
    made = _error_of(error)
    here = refusal_here.get()
    if here is not None:
        here.error = made
    return made


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
    return _admitted(original, manager, admission, obj, request)


class _Held:
    """A generation or embedding that waits for memory, which a caller may abort.

    Args:
        obj: SGLang's request.
        request: the server's request; None if there is none, or if its client may disconnect.
    """

    def __init__(self, obj: Any, request: Any) -> None:
        self._obj = obj
        self._is_gone = _is_gone(request)
        self._is_aborted = False

    def abort(self, rid: str, abort_all: bool) -> None:
        rids = getattr(self._obj, "rid", None)
        if abort_all or rid in ([rids] if isinstance(rids, str) else rids or ()):
            self._is_aborted = True

    def check(self) -> None:
        """Raise `RequestAbortedError` if a caller has aborted the request."""
        if self._is_aborted:
            raise RequestAbortedError("the request was aborted while it waited for the engine")

    async def is_gone(self) -> bool:
        self.check()
        return self._is_gone is not None and await self._is_gone()


def abort(
    original: Callable[..., Any], manager: Any, rid: str = "", abort_all: bool = False
) -> Any:
    """Wrap `TokenizerManager.abort_request`, which aborts only requests that were sent."""
    for held in vars(manager).get(_HELD, ()):
        held.abort(rid, abort_all)
    return original(manager, rid, abort_all)


async def _admitted(
    original: Callable[..., Any], manager: Any, admission: Admission, obj: Any, request: Any
) -> AsyncIterator[Any]:
    what = "compute embeddings" if type(obj).__name__ == "EmbeddingReqInput" else "generate"
    deadline = admission.deadline()
    # The client of a background request may disconnect.
    client = None if getattr(obj, "background", False) else request
    all_held = vars(manager).setdefault(_HELD, [])
    while True:
        held = _Held(obj, client)
        all_held.append(held)
        try:
            await admission.admit(EVERYTHING, what, deadline=deadline, is_gone=held.is_gone)
            held.check()
        except EngineAsleepError as error:
            raise _refused(error) from error.__cause__
        finally:
            all_held.remove(held)
        unsent = copy.copy(obj)  # SGLang changes the original
        refused, begun, parts = None, False, dict[int, Any]()
        outputs = original(manager, obj, request)
        try:
            async for output in outputs:
                refused = _refusal_in(output)
                if refused is not None and begun:
                    refused, part = None, _refused_part(admission, obj, output)
                    if part is not None:
                        parts[output["index"]] = part
                        continue
                if refused is not None:
                    break
                begun = True
                yield output
        except EngineAsleepError as error:  # raised by `abort_reason`
            if begun:
                raise
            refused = error
        finally:
            await outputs.aclose()
        if refused is None:
            break
        await _discard(manager, obj, deadline)
        if getattr(obj, "is_single", False):
            unsent.rid = obj.rid  # with which the server aborts the request
        obj = unsent
        await _again(admission, refused, deadline)
    for index, part in parts.items():
        async for output in _admitted(original, manager, admission, part, request):
            output["index"] = index
            yield output


def _refused_part(admission: Admission, obj: Any, output: Any) -> Any:
    """Return the request for a prompt of a streamed batch that a scheduler refused.

    Returns:
        The request for this prompt alone, which has had no output yet; None if refused requests are
        not sent again, or if the prompt has several samples. Its output is the refusal then.
    """
    at = output.get("index")
    if not _repeats(admission) or at is None or getattr(obj, "parallel_sample_num", 1) > 1:
        return None
    return copy.copy(obj[at])


def _refusal_in(output: Any) -> EngineAsleepError | None:
    """Return the refusal in the first output of a stream; None for any other output."""
    try:
        reason = output["meta_info"]["finish_reason"]
        return asleep_in(reason["message"]) if reason["type"] == "abort" else None
    except (KeyError, TypeError):
        return None


async def _discard(manager: Any, obj: Any, deadline: float) -> None:
    """Abort the parts of a refused request that a scheduler has accepted, and wait until they end.

    The schedulers' answers end the parts and remove their states. SGLang 0.5.12 exits if it
    receives an answer for a part without a state.
    """
    rids = [obj.rid] if isinstance(obj.rid, str) else list(obj.rid or ())
    for rid in rids:
        if getattr(obj, "parallel_sample_num", 1) > 1:
            manager.rid_to_state.pop(rid, None)  # not sent: the samples have names of their own
        elif rid in manager.rid_to_state:
            manager.abort_request(rid)
    now = asyncio.get_running_loop().time
    while not manager.rid_to_state.keys().isdisjoint(rids) and now() < deadline:
        await asyncio.sleep(_RETRY_SECONDS)


def discard_pending(original: Callable[..., Any], manager: Any, obj: Any) -> Any:
    """Wrap `TokenizerManager._discard_pending_req_states`, which forgets parts that were sent.

    `_discard` aborts them if the request is sent again.
    """
    is_refused = isinstance(sys.exc_info()[1], EngineAsleepError)
    if is_refused and _repeats(admission_of(manager)):
        return None
    return original(manager, obj)


async def abort_reason(
    original: Callable[..., Awaitable[Any]], manager: Any, output: Any, *args: Any
) -> Any:
    """Wrap `TokenizerManager._handle_abort_finish_reason`, which raises SGLang's own error."""
    refused = _refusal_in(output)
    if refused is None:
        return await original(manager, output, *args)
    admission = admission_of(manager)
    if admission is not None:
        admission.learn(refused.tags)
    is_final = not _repeats(admission)
    try:
        result = await original(manager, output, *args)
    except Exception as error:
        raise (_refused if is_final else _error_of)(refused) from error
    if result is not None and is_final:
        _refused(refused)  # the first output of a stream
    return result
