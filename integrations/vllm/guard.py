"""The guard in vLLM's engine core, which refuses requests that need released memory.

Without the guard, a generation request that arrives while memory is released would wait
indefinitely, because vLLM's scheduler is paused. Other requests that use the weights, such as loads
of LoRA adapters, would crash the engine. The guard runs before the engine core's handlers, on the
thread of the core's loop, and reads the executor's record of the state of all ranks. The guard
takes effect only while memsaver's memory is released. It adds no work to a decoding step.

| request | while memory is released |
|---|---|
| generation, embedding | refused |
| generation, embedding, while the engine finishes others before a sleep | held; then refused |
| weight update, LoRA load, read of the weights | refused if the weights are released |
| resume of the scheduler | succeeds: the last wake-up resumes it |
| sleep, wake-up, abort, pause, query, reset of a cache | as usual |
| `collective_rpc` of an unknown method | runs, and is logged; an error names the released tags |

Requests that were accepted before the sleep and were not aborted continue after the wake-up. A
sleep with `mode="wait"` waits until the requests that the scheduler has begun are finished. vLLM
would hold all other requests indefinitely, so the guard refuses them, as it does new requests. With
data parallelism, each engine core decides based on its own state.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ..engine.errors import EngineError
from ..engine.refusals import asleep_text
from ..engine.tags import WEIGHTS
from . import settings
from .calls import FINISH, MODEL, RELOAD, START, check_level, need_of
from .idle_sleep import IdleRelease, IdleSleep
from .logs import logger
from .protocol import RANK_STATE
from .rewritten import has_draft
from .worker import installed_allocator

__all__ = ["before_wait", "guard_of", "handle", "memsaver_memory", "sleep", "woken"]

_GUARD = "_memsaver_guard"  # an attribute of an engine core
_PAUSE_SCHEDULER, _RESUME_SCHEDULER = "pause_scheduler", "resume_scheduler"
_NOT_BEGUN = ("WAITING", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR")  # statuses of requests
_MOST_LINES = 20  # about unknown methods


def guard_of(core: Any) -> Guard:
    """Return an engine core's guard."""
    found = vars(core).get(_GUARD)
    if found is None:
        found = Guard(core)
        setattr(core, _GUARD, found)
    return found  # type: ignore[no-any-return]


def handle(original: Callable[..., None], core: Any, kind: Any, request: Any) -> None:
    """Wrap `EngineCoreProc._handle_client_request`."""
    guard_of(core).handle(functools.partial(original, core), kind, request)


def sleep(
    original: Callable[..., Any], core: Any, level: int = 1, mode: str = "abort"
) -> Future[Any] | None:
    """Wrap `EngineCore.sleep`, which returns a future if it must first wait for requests.

    Raises:
        ConfigError: vLLM does not support this level.
    """
    check_level(level)
    guard = guard_of(core)
    guard.resumes = False
    if not level:
        return original(core, level, mode)  # type: ignore[no-any-return]
    if mode == "wait" and guard.is_ours and not core.is_scheduler_paused():
        guard.hold_queued()
    return guard.sleep(functools.partial(original, core, level, mode), level)


def woken(result: Any, core: Any, *_: Any) -> Any:
    """Record a wake-up after `EngineCore.wake_up`."""
    guard_of(core).woken()
    return result


def before_wait(original: Callable[..., None], core: Any) -> None:
    """Wrap `EngineCoreProc._notify_idle_state_callbacks`, which runs before a wait for requests."""
    original(core)
    idle = guard_of(core).idle
    if idle is not None:
        idle.wait_begins()


def memsaver_memory(core: Any, touch: bool = False, failed: bool = False) -> str:
    """Return the state of an engine core's memory, as JSON. A method of `EngineCore`.

    Args:
        core: the engine core.
        touch: whether a request will follow. If so, an idle engine does not release its memory.
        failed: whether to include the last errors of releases and wake-ups.

    Returns:
        The JSON object has the fields `released` (the released tags), `lost` (if tags are released,
        the tags without contents; see `Guard.lost`), `other` (whether another allocator released
        memory) and `failures` (a list of `Failure`).
    """
    guard = guard_of(core)
    if touch and guard.idle is not None:
        guard.idle.restart()
    released = guard.released
    return json.dumps(
        {
            "released": sorted(released),
            "lost": sorted(guard.lost if released else ()),
            "other": bool(core.model_executor.is_sleeping and not released),
            "failures": guard.failures() if failed else [],
        }
    )


def _has_memsaver(_: Any) -> bool:
    """Return whether a worker's allocator is memsaver."""
    return installed_allocator() is not None


class Guard:
    """The guard of one engine core; see the module's docstring.

    Attributes:
        idle: the object that releases the memory of an idle engine; None if the settings do not
            request this.
        lost: the tags whose contents were discarded and have not been loaded since. The value is
            meaningful only while memory is released, because the caller that wakes up the last tag
            is responsible for the contents.
        refusal: the fields of the `Failure` of the last call in `direct_calls` that raised one of
            memsaver's errors; None before the first.
        resumes: whether the wake-up of the last tag resumes the scheduler for an earlier call.

    Args:
        core: the engine core.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        self._is_draining = False
        self._held: list[tuple[Any, Callable[[], None]]] = []  # requests, and their dispatch
        self._logged: set[str] = set()  # requests refused since the last wake-up
        self._unknown: set[str] = set()  # unknown methods that have run while memory was released
        self.lost: frozenset[str] = frozenset()
        self.refusal: dict[str, Any] | None = None
        self.resumes = False
        self._update_call = ""  # the last update call; "" after a sleep that discarded the weights
        self.idle = IdleSleep.of(core, settings.policy_of(core).sleep_after)

    @property
    def released(self) -> frozenset[str]:
        """The tags that memsaver has released; empty if the workers use another allocator."""
        executor = self._core.model_executor
        if not executor.is_sleeping:
            return frozenset()
        released = MODEL.intersection(executor.sleeping_tags)
        return released if released and self.is_ours else frozenset()

    @functools.cached_property
    def is_ours(self) -> bool:
        """Whether memsaver manages the memory of all workers."""
        return all(self._core.model_executor.collective_rpc(_has_memsaver))

    @functools.cached_property
    def has_draft(self) -> bool:
        """Whether a draft model might exist; an update does not change its weights."""
        return any(self._core.model_executor.collective_rpc(has_draft))

    def failures(self) -> list[dict[str, Any]]:
        """Return `refusal`, and the fields of the last sleep's or wake-up's `Failure`."""
        found = [] if self.refusal is None else [self.refusal]
        for state in self._core.model_executor.collective_rpc(RANK_STATE) if self.is_ours else ():
            if state["last"] is not None and state["last"]["failure"] is not None:
                return [*found, dict(state["last"]["failure"])]
        return found

    def sleep(self, work: Callable[[], Future[Any] | None], level: int) -> Future[Any] | None:
        """Put some or all tags to sleep, and record the sleep.

        If the sleep fails, the scheduler continues.
        """
        core = self._core
        # Another allocator may have released memory before it failed, and the ranks of a model with
        # experts can only continue together.
        continues = (
            self.is_ours and not core.is_scheduler_paused() and not hasattr(core, "dp_group")
        )
        before = frozenset(core.model_executor.sleeping_tags)
        ended = functools.partial(self._ended, level, before, continues)
        try:
            pending = work()
        except Exception:
            ended(failed=True)
            raise
        if pending is None:
            ended(failed=False)
            return None
        self._is_draining = True
        pending.add_done_callback(functools.partial(self._drained, ended))
        return pending

    def woken(self) -> None:
        """Record a wake-up of any tags."""
        self._logged.clear()
        if not self._core.model_executor.sleeping_tags:
            self.lost = frozenset()
            if self.resumes and self._core.is_scheduler_paused():
                self._core.resume_scheduler()
            self.resumes = False

    def woken_without_contents(self) -> None:
        """Record that the weights were mapped for an update that might begin later."""
        if self._core.model_executor.sleeping_tags:
            self.lost |= {WEIGHTS}

    def loaded(self) -> None:
        """Record that an update has loaded all weights."""
        self.lost -= {WEIGHTS}

    def updated(self, method: str) -> None:
        """Record a successful call of `UPDATE_CALLS`."""
        if method == RELOAD or (method == FINISH and self._update_call == START):
            self.loaded()
        self._update_call = method

    def wake_failed(self) -> None:
        """Record the contents that were lost in a failed wake-up without a restore."""
        for state in self._core.model_executor.collective_rpc(RANK_STATE):
            if state["last"] is not None:
                self.lost |= frozenset(state["last"]["lost"])

    def _ended(self, level: int, before: frozenset[str], continues: bool, failed: bool) -> None:
        executor = self._core.model_executor
        if not failed and level == 2:
            lost = {WEIGHTS}.intersection(executor.sleeping_tags) - before
            self.lost |= lost
            self._update_call = "" if lost else self._update_call
        elif failed and continues and not executor.is_sleeping:
            self._core.resume_scheduler()
        self._admit_held()

    def _drained(self, ended: Callable[..., None], pending: Future[Any]) -> None:
        self._is_draining = False
        ended(failed=pending.cancelled() or pending.exception() is not None)

    def hold_queued(self) -> None:
        """Abort requests that the scheduler has not begun; refuse them when the sleep ends."""
        scheduler = self._core.scheduler
        found = [
            request
            for request in scheduler.requests.values()
            if request.status.name in _NOT_BEGUN and not request.resumable
        ]
        if not found:
            return
        aborted = importlib.import_module("vllm.v1.request").RequestStatus.FINISHED_ABORTED
        scheduler.finish_requests([request.request_id for request in found], aborted)
        for request in found:
            again = functools.partial(self._refuse, request, MODEL, "its sleep failed: try again")
            self._held.append((request, again))

    def _admit_held(self) -> None:
        """Dispatch or refuse the held requests; refuse a request whose dispatch raises an error."""
        held, self._held = self._held, []
        for request, dispatch in held:
            try:
                self._admit(request, dispatch)
            except Exception as error:
                logger.error("a held request failed", exc_info=error)
                self._refuse(request, self.released or MODEL, f"it failed: {error}")

    def _admit(self, request: Any, dispatch: Callable[[], None]) -> None:
        if self._is_draining:
            self._held.append((request, dispatch))
        elif released := self.released:
            self._refuse(request, released)
        else:
            dispatch()

    def handle(self, dispatch: Callable[..., None], kind: Any, request: Any) -> None:
        """Dispatch a client's request to the engine core, or refuse it."""
        if isinstance(kind, IdleRelease):
            kind.run()
            return
        name = getattr(kind, "name", "")
        if self.idle is not None:
            self.idle.received(name, request)
        if name == "ADD" and self._is_new(request[0]):
            self._admit(request[0], functools.partial(dispatch, kind, request))
            return
        if name == "UTILITY" and self._answers(request):
            return
        if name == "ABORT" and self._held:
            self._held = [one for one in self._held if one[0].request_id not in request]
        dispatch(kind, request)

    def _is_new(self, request: Any) -> bool:
        """Return whether a request is new rather than part of one that the scheduler has."""
        known = getattr(self._core.scheduler, "requests", {})
        return request.request_id not in known and not getattr(request, "abort_immediately", False)

    def run_unknown(self, method: object, work: Callable[[], Any]) -> Any:
        """Run a `collective_rpc` of an unknown method; if memory is released, log the call.

        The call is not refused, because programs can call their own methods while an engine sleeps,
        for example to join a process group.

        Args:
            method: the name of a method of the workers, or a function.
            work: the function that makes the call.

        Raises:
            EngineError: the call failed while memory was released. This error is raised only if the
                engine core has its own process, because that process sends only an error's text.
        """
        released = self.released
        if not released:
            return work()
        tags = ", ".join(sorted(released))
        name = method if isinstance(method, str) else getattr(method, "__qualname__", "a function")
        self._report(name, tags)
        try:
            return work()
        except Exception as error:
            if not hasattr(self._core, "output_queue"):
                raise
            raise EngineError(f"{error} ({name} ran while {tags} were released)") from error

    def _report(self, name: str, tags: str) -> None:
        if name not in self._unknown and len(self._unknown) < _MOST_LINES:
            self._unknown.add(name)
            logger.warning(
                "a collective_rpc runs %s while %s are released: memsaver does not know which "
                "memory it uses, and an access to released memory ends the engine, so wake the "
                "tags that it uses first; later calls of it are not logged",
                name,
                tags,
            )

    # --- refusals ---------------------------------------------------------------------------------

    def _refuse(self, request: Any, released: frozenset[str], more: str = "") -> None:
        what = "generate" if request.pooling_params is None else "compute embeddings"
        text = asleep_text(released, what, more)
        self._log(what, text)
        vllm = importlib.import_module("vllm.v1.engine")
        output = vllm.EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=vllm.FinishReason.ABORT,
            stop_reason=text,
        )
        outputs = vllm.EngineCoreOutputs(outputs=[output], finished_requests={request.request_id})
        self._core.output_queue.put_nowait((request.client_index, outputs))

    def _answers(self, call: Any) -> bool:
        """Answer a call that must not run now; return False for any other call."""
        client, number, method, args = call
        self.resumes = self.resumes and method != _PAUSE_SCHEDULER
        need = need_of(method, args)
        if need is None and method != _RESUME_SCHEDULER:
            return False
        released = self.released
        if need is not None and need.tags & released:
            text = asleep_text(released, need.what)
            self._log(need.what, text)
            self._answer(client, number, text)
            return True
        if method == _RESUME_SCHEDULER and released:
            self.resumes, tags = True, ", ".join(sorted(released))
            logger.warning("generation continues after a wake-up of %s, which are released", tags)
            self._answer(client, number, None)
            return True
        return False

    def _answer(self, client: int, number: int, failure: str | None) -> None:
        vllm = importlib.import_module("vllm.v1.engine")
        output = vllm.UtilityOutput(number)
        output.failure_message = failure
        output.result = None if failure else vllm.UtilityResult(None)
        outputs = vllm.EngineCoreOutputs(utility_output=output)
        self._core.output_queue.put_nowait((client, outputs))

    def _log(self, what: str, text: str) -> None:
        if what not in self._logged:
            self._logged.add(what)
            logger.warning(
                "a request is refused: %s; later refusals are not logged until a wake-up", text
            )
