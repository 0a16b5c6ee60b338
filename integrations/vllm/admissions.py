"""Hooks in vLLM's `AsyncLLM` for requests to a sleeping engine.

The hooks apply the policy of `settings.policy_of` before a request is sent to the engine cores. The
guard in each engine core (`guard`) makes the final check. If the guard refuses a request because a
release arrived first, the hooks send the request again or raise the same error, according to the
policy.

| policy | a request that needs released memory |
|---|---|
| refuse | raises `EngineAsleepError`; the server answers with status 503 |
| wait | is held, in order, until the memory is resumed; raises after a timeout |
| wake | resumes the memory that it needs; if too little is free, retries for a time, then raises |

If a held or refused request is aborted, it fails with `RequestAbortedError`. A client that
disconnects cancels its request. If the engine exits, held requests raise vLLM's `EngineDeadError`.
The hooks do nothing if the engine cannot sleep, or if an allocator other than memsaver has
released the memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Iterator
from typing import Any

from memsaver.errors import MemsaverError

from ..engine import admitted
from ..engine.admission import Admission
from ..engine.errors import EngineAsleepError, EngineError
from ..engine.refusals import asleep_in, refused
from ..engine.shared_query import QUERY_SECONDS, SharedQuery
from ..engine.tags import WEIGHTS
from . import settings, unsent_inputs
from .calls import MODEL, Need
from .control_hooks import ControlHooks
from .cores import Memory, alive, error_from, memory_of_async, rpc_on_all_cores
from .local import sleep_mode_of
from .logs import logger
from .protocol import CORE_CALLS

__all__ = [
    "Cores",
    "abort",
    "admission_of",
    "assumed_asleep_if_interrupted",
    "control",
    "encode",
    "generate",
    "get_admission",
    "process_outputs",
    "record_change",
    "record_memory",
]

_ATTRIBUTE = "_memsaver_admission"  # of an engine


class VllmAdmission(Admission):
    """An engine's `Admission`.

    Attributes:
        is_ours: whether memsaver manages the engine's memory; None until a query of an engine with
            released memory has determined the value. If False, new requests bypass the admission;
            held requests can still be aborted.
    """

    is_ours: bool | None = None


def admission_of(engine: Any) -> VllmAdmission | None:
    """Return an `AsyncLLM`'s `Admission`; None if memsaver does not manage its memory."""
    return get_admission(engine, _AsyncCores)


def get_admission(engine: Any, sleeper: Callable[[Any], Any]) -> VllmAdmission | None:
    """Return an engine's `Admission`, which the first call creates; None if there is none."""
    found = vars(engine).get(_ATTRIBUTE, False)
    if found is False:
        is_on = settings.is_on() and sleep_mode_of(engine.vllm_config)
        found = VllmAdmission(settings.policy_of(engine), sleeper(engine)) if is_on else None
        setattr(engine, _ATTRIBUTE, found)
    return None if found is None or found.is_ours is False else found


class Cores:
    """See `engine.admission.Sleeper`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def _wake(self, tags: list[str] | None) -> None:
        await _checked(self._engine, self._engine.engine_core.wake_up_async(tags))

    async def resume(self, tags: Collection[str]) -> frozenset[str]:
        """See `Sleeper`."""
        engine = self._engine
        before: frozenset[str] = vars(engine)[_ATTRIBUTE].released
        logger.info("a request wakes the engine: resuming %s", ", ".join(tags))
        try:
            # With data parallelism, the cores' own tags may differ: None resumes all of them.
            await self._wake(None if before <= set(tags) else list(tags))
        except MemsaverError:
            raise
        except Exception as error:
            if getattr(engine, "errored", False):
                raise
            raise EngineError(str(error)) from error
        left = before.difference(tags)
        if engine.logger_manager is not None and not left:
            engine.logger_manager.record_sleep_state(0, 0)
        return left


class _AsyncCores(Cores):
    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._query = SharedQuery(lambda: memory_of_async(engine.engine_core), logger)

    async def released(self) -> frozenset[str] | None:
        if self._engine.errored:
            raise self._engine.dead_error
        memory = await self._query.answer()
        return None if memory is None else record_memory(self._engine, memory)


def record_memory(engine: Any, memory: Memory) -> frozenset[str]:
    """Record an engine's allocator and the tags with lost contents; return the released tags."""
    admission: VllmAdmission = vars(engine)[_ATTRIBUTE]
    if memory.is_others:
        admission.is_ours = False
        return frozenset()
    if memory.released and admission.is_ours is None:
        admission.is_ours = True
    admission.without_backup = admission.lost = memory.lost
    return memory.released


async def _checked(engine: Any, work: Awaitable[Any]) -> Any:
    """Return the result of a sleep or a wake-up, or raise an error of the original type."""
    try:
        return await alive(engine, work)
    except Exception as error:
        found = error
        with contextlib.suppress(Exception):  # an engine does not answer if a worker has exited
            query = alive(engine, memory_of_async(engine.engine_core, failed=True))
            found = error_from(error, await asyncio.wait_for(query, QUERY_SECONDS))
        if engine.errored:
            raise engine.dead_error from error
        if found is error:
            raise
        raise found from error


async def _changed(engine: Any, work: Callable[[], Awaitable[Any]], **change: Any) -> Any:
    admission = admission_of(engine)
    if admission is None:
        return await work()
    async with admission.changing:
        with assumed_asleep_if_interrupted(admission):
            try:
                result = await _checked(engine, work())
            except Exception:
                if not engine.errored:
                    await admission.refresh()
                raise
            if not record_change(admission, **change):
                await admission.refresh()
    return result


@contextlib.contextmanager
def assumed_asleep_if_interrupted(admission: VllmAdmission) -> Iterator[None]:
    """Record all memory as released if the block is interrupted or cancelled.

    The engine core might still perform the block's sleep or wake-up. A query of the engine corrects
    the record. The engine is queried before a request is refused or wakes the engine, and when a
    request has waited for more than a second.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException:
        admission.learn(MODEL)
        raise


def record_change(
    admission: VllmAdmission, level: int | None = None, woken: Collection[str] | None = ()
) -> bool:
    """Record a successful sleep or wake-up without querying the engine.

    Returns:
        Whether the new state is known; if it is unknown, the caller must query the engine.
    """
    if level == 0:
        return True
    if woken is None:
        admission.learn(())
        return True
    if woken:
        if not {*woken} - {"scheduling"} <= admission.released:
            return False  # vLLM ignores a wake-up of several tags if one of them is mapped
        admission.learn(admission.released.difference(woken))
        return True
    if level is None or admission.released or not admission.is_ours:
        return False
    admission.without_backup = frozenset({WEIGHTS} if level == 2 else ())
    admission.learn(MODEL)
    return True


# --- generations and embeddings -------------------------------------------------------------------


def generate(original: Callable[..., Any], engine: Any, *args: Any, **named: Any) -> Any:
    """Wrap `AsyncLLM.generate`, which returns an asynchronous iterator."""
    return _admitted("generate", original, engine, args, named)


def encode(original: Callable[..., Any], engine: Any, *args: Any, **named: Any) -> Any:
    """Wrap `AsyncLLM.encode`, which returns an asynchronous iterator."""
    return _admitted("compute embeddings", original, engine, args, named)


def _admitted(
    what: str, original: Callable[..., Any], engine: Any, args: Any, named: dict[str, Any]
) -> Any:
    admission = admission_of(engine)
    if admission is None:
        return original(engine, *args, **named)
    request = _Generation(original, engine, args, named)
    outputs = admitted.generation(admission, what, request)
    return unsent_inputs.tracked(engine, args[0], outputs, lambda: request.is_sent)


async def _is_gone(engine: Any) -> bool:
    """Return False, because a client that disconnects cancels the task of its held request.

    Raises:
        EngineDeadError: the engine has exited (this class is vLLM's).
    """
    if engine.errored:
        raise engine.dead_error
    return False


class _Generation:
    """See `admitted.Generation`."""

    def __init__(
        self, original: Callable[..., Any], engine: Any, args: Any, named: dict[str, Any]
    ) -> None:
        self._original = original
        self._engine = engine
        self._prompt, *self._args = args  # parameters and name
        self._named = named
        self._refusal: EngineAsleepError | None = None
        self.is_sent = False

    @property
    def ids(self) -> list[str]:
        return [self._args[1]]

    async def is_gone(self) -> bool:
        return await _is_gone(self._engine)

    async def send(self) -> AsyncGenerator[Any, None]:
        self.is_sent = True
        is_stream = isinstance(self._prompt, AsyncGenerator)
        prompt = self._prompt if is_stream else copy.copy(self._prompt)  # vLLM changes it
        outputs = self._original(self._engine, prompt, *self._args, **self._named)
        try:
            async for output in outputs:
                yield output
        except Exception as error:
            cause = error if isinstance(error, EngineAsleepError) else error.__cause__
            if not isinstance(cause, EngineAsleepError):
                raise
            self._refusal = cause
            raise cause from None
        finally:
            await outputs.aclose()

    def refusal_in(self, output: Any) -> EngineAsleepError | None:
        return None

    def refused_part(self, output: Any) -> None:
        """Return None, because each request to vLLM has only one prompt."""

    async def take_back(self, deadline: float) -> None:
        if self._refusal is not None and isinstance(self._prompt, AsyncGenerator):
            raise refused(self._refusal)  # a part of the prompt was already read


async def abort(
    original: Callable[..., Awaitable[Any]],
    engine: Any,
    request_id: str | Iterable[str],
    internal: bool = False,
) -> Any:
    """Wrap `AsyncLLM.abort`, which itself aborts only requests that were sent."""
    ids = [request_id] if isinstance(request_id, str) else list(request_id)
    admission = admission_of(engine) or vars(engine)[_ATTRIBUTE]  # held requests may remain
    if admission is not None:
        # vLLM passes one internal name to abort one request, and a list of them to abort all.
        sent = engine.output_processor.request_states
        every = internal and not isinstance(request_id, str) and sent.keys() <= set(ids)
        admission.abort([] if internal else ids, every)
    return await original(engine, ids, internal)


def process_outputs(
    original: Callable[..., Any], processor: Any, outputs: Any, *args: Any, **named: Any
) -> Any:
    """Wrap `OutputProcessor.process_outputs`, and fail the requests that an engine core refused.

    The guard sends refusals in separate messages.

    Raises:
        EngineAsleepError: a request of an `LLMEngine` was refused.
    """
    if not outputs or asleep_in(outputs[0].stop_reason) is None:
        return original(processor, outputs, *args, **named)
    for output in outputs:
        error = asleep_in(output.stop_reason)
        state = processor.request_states.get(output.request_id)
        if error is None or state is None:
            continue
        if state.queue is None:
            # The caller stops at the first error, and the engine core refuses the later requests
            # too. The states are in the order of the requests.
            names = list(processor.request_states)
            ended = names[names.index(output.request_id) :]
            processor.abort_requests(ended, internal=True)
            raise refused(error)
        processor.abort_requests([output.request_id], internal=True)
        state.queue.put(error)  # replaces the output of the abort
    return original(processor, [], *args, **named)


async def _call(engine: Any, need: Need | None, send: Callable[[], Awaitable[Any]]) -> Any:
    admission = admission_of(engine)
    if admission is None:
        return await send()
    if need is None:
        return await alive(engine, send())

    async def checked() -> Any:
        try:
            return await alive(engine, send())
        except Exception as error:
            refusal = asleep_in(str(error))
            if refusal is None:
                raise
            raise refusal from error

    return await admitted.call(
        admission,
        need.tags,
        need.what,
        checked,
        lambda result: None,
        reads=need.reads,
        is_gone=lambda: _is_gone(engine),
    )


class _AsyncHooks(ControlHooks):
    def collective_rpc(
        self, original: Callable[..., Any], engine: Any, method: Any, *args: Any, **named: Any
    ) -> Any:
        if method in CORE_CALLS:  # vLLM returns only the first engine core's answer
            original = _rpc_on_all_cores
        return super().collective_rpc(original, engine, method, *args, **named)


def _rpc_on_all_cores(engine: Any, *args: Any, **named: Any) -> Awaitable[list[Any]]:
    return rpc_on_all_cores(engine.engine_core, *args, **named)


control = _AsyncHooks(_changed, _call)
