"""Answer memsaver's calls in vLLM's engine core, which knows the requests in flight.

The calls arrive through vLLM's collective_rpc. Only this function lets every client (an LLM, an
AsyncLLM and a server's /collective_rpc) call methods by arbitrary names. This module answers
queries of the state and of the engine's description, and releases and resumes tags; other calls are
passed to the workers.

This module uses vLLM's own sleep and wake-up to release and resume the weights and the KV cache, so
vLLM's state and other clients' calls remain valid. vLLM's sleep always releases both tags, so a
single tag is released by a call to the workers. CUDA graphs that cannot be released count as
released while the weights and the KV cache are released. CUDA graphs that can be released are never
released alone, because the scheduler would continue to run without the graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any

from memsaver.errors import ConfigError, InvalidStateError, MemsaverError

from ..engine.loops import settle
from ..engine.messages import Answer, Failure, SchedulerState
from ..engine.tags import GRAPH, KV_CACHE, RELEASE_ORDER, WEIGHTS, check_known
from ..engine.weights.checks import RankCheck, is_good
from . import direct_calls
from .calls import DIRECT, UPDATE_CALLS, is_known
from .direct_calls import check_idle, is_idle, set_asleep
from .guard import guard_of
from .link import without_sleep_mode
from .local import MARK, arguments_of, sleep_mode_of
from .protocol import (
    END,
    INFO,
    RANK_STATE,
    RELEASE,
    RELEASE_PART,
    RESUME,
    STATE,
    VERSION,
    WAKE_REWRITTEN,
    WORKER_CALLS,
)
from .worker import installed_allocator

__all__ = ["install"]

_VERSION = "_memsaver_weight_version"  # an attribute of an engine core
_SLEEPING = (WEIGHTS, KV_CACHE)  # the tags that vLLM's executor knows


def install(core: Any) -> None:
    """Add memsaver's calls to vLLM's engine core class. Idempotent.

    Raises:
        AttributeError: the class does not have the expected methods.
    """
    if MARK in vars(core):
        return
    original = core.collective_rpc
    for name in ("sleep", "wake_up", "pause_scheduler", "resume_scheduler"):
        getattr(core, name)

    @functools.wraps(original)
    def collective_rpc(
        self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        answer = _ANSWERS.get(method) if isinstance(method, str) else None
        if answer is None:
            if isinstance(method, str) and method in WORKER_CALLS:
                # The workers limit this wait themselves. An executor that did not wait for them
                # would leave their responses in its queues, where its next call would find them.
                timeout = None
            call = functools.partial(original, self, method, timeout, args, kwargs)
            if not is_known(method):
                return guard_of(self).run_unknown(method, call)
            if method in DIRECT:
                direct = functools.partial(original, self, method, timeout)
                return direct_calls.run(self, method, args, kwargs or {}, direct)
            result = call()
            if method in UPDATE_CALLS:
                guard_of(self).updated(method)
            return result
        return _then(answer(self, *args), lambda result: [result])

    core.collective_rpc = collective_rpc
    setattr(core, MARK, True)


def _info(core: Any) -> dict[str, Any]:
    return arguments_of(core.vllm_config, getattr(core, _VERSION, None))


def _set_version(core: Any, version: str) -> None:
    setattr(core, _VERSION, str(version))
    if hasattr(core, "set_weight_version"):  # vLLM 0.33
        core.set_weight_version(str(version))


def _state(core: Any) -> dict[str, Any]:
    return asdict(_state_of(core))


def _state_of(core: Any, *, measures: bool = False) -> SchedulerState:
    """Return the state of all ranks.

    A tag counts as released if vLLM's executor counts it as asleep, or if a rank has released it.
    The two conditions differ after a failed rollback; `held` in the last answer then contains the
    tags that a rank has not released.

    Args:
        core: the engine core.
        measures: whether the reports of a release of all memory include the memory that is still in
            use. Each rank measures only its own memory.
    """
    rows = core.model_executor.collective_rpc(RANK_STATE, args=(measures,))
    states = list(map(SchedulerState.from_fields, rows))
    each = [set(state.released) for state in states]
    asleep = set(_SLEEPING).intersection(core.model_executor.sleeping_tags)
    released = _full(asleep.union(*each))
    last = states[0].last
    if last is not None:
        # Without a failure, a tag that a rank has not released has no memory.
        mapped = asleep - each[0].intersection(*each) if last.failure is not None else ()
        last = replace(last, released=released, held=tuple(sorted(mapped)))
    if last is not None and measures:
        answers = [state.last for state in states if state.last is not None]
        reports = (report for answer in answers for report in answer.ranks)
        held = {report.rank: report.held for report in reports if report.held}
        ranks = [replace(report, held=held.get(report.rank, {})) for report in last.ranks]
        last = replace(last, ranks=tuple(ranks))
    return replace(states[0], released=released, idle=is_idle(core), last=last)


def _full(released: Collection[str]) -> tuple[str, ...]:
    """Add the graphs to the released tags if no other tag is mapped."""
    found = {*released, GRAPH} if set(_SLEEPING) <= set(released) else set(released)
    return tuple(tag for tag in RELEASE_ORDER if tag in found)


def _release(core: Any, tags: Sequence[str], level: int, keep_weights: bool = True) -> Any:
    if not keep_weights and not guard_of(core).has_draft:
        level = 2

    def work(state: SchedulerState) -> Any:
        if not sleep_mode_of(core.vllm_config):
            raise without_sleep_mode()
        if hasattr(core, "dp_group"):
            raise ConfigError(
                "the replicas of a mixture of experts can only pause together, so their memory "
                "cannot be released by this call: use vLLM's own sleep() and wake_up()"
            )
        check_idle(core)
        if not set(tags).isdisjoint(state.held):
            raise InvalidStateError(
                f"{', '.join(state.held)} cannot be released on the ranks that still have the "
                "memory, because a failed sleep or wake-up released it on others: wake the engine "
                "up first"
            )
        asleep = state.released
        if {*tags, *asleep} == {GRAPH} and any(core.model_executor.collective_rpc(_has_graphs)):
            raise ConfigError(
                "the CUDA graphs can only be released together with the weights or the KV cache, "
                "because vLLM cannot generate without them"
            )
        # If only the graphs are to be released, the workers release them.
        going = [tag for tag in tags if tag in _SLEEPING and tag not in asleep] or list(tags)
        if set(going) == set(_SLEEPING):
            return core.sleep(level, "keep")  # keeps requests that wait in a pause
        part = [*going, *(GRAPH,) * (GRAPH in tags)]
        guard = guard_of(core)
        if not guard.is_ours:
            raise ConfigError(
                f"vLLM's own allocator cannot release {', '.join(tags)} alone: release the weights "
                "and the KV cache together"
            )
        return guard.sleep(lambda: _release_part(core, part, level), level)

    return _answered(core, "release", tags, work)


def _has_graphs(_: Any) -> bool:
    """Return whether a worker's CUDA graphs are in memory that can be released."""
    allocator = installed_allocator()
    return allocator is not None and GRAPH in allocator.tags


def _release_part(core: Any, tags: Sequence[str], level: int) -> Any:
    """Release some tags, and set vLLM's executor to the state that follows a partial wake-up."""
    was_paused = core.is_scheduler_paused()

    def release(_: Any) -> None:
        executor = core.model_executor
        executor.collective_rpc(RELEASE_PART, args=(list(tags), level))
        set_asleep(executor, {*executor.sleeping_tags, *set(tags).intersection(_SLEEPING)})
        if not executor.sleeping_tags and not was_paused:  # the graphs alone
            core.resume_scheduler()

    return _then(core.pause_scheduler("keep", KV_CACHE in tags), release)


def _resume(core: Any, tags: Sequence[str], keep_weights: bool = True) -> Any:
    def work(_: SchedulerState) -> None:
        executor = core.model_executor
        coming = [tag for tag in tags if tag in _SLEEPING and tag in executor.sleeping_tags]
        if coming and not keep_weights and WEIGHTS in coming and guard_of(core).is_ours:
            _wake_rewritten(core, coming)
        elif coming:
            core.wake_up(coming)
        else:  # any wake-up maps the graphs
            executor.collective_rpc("wake_up", kwargs={"tags": []})

    return _answered(core, "resume", tags, work)


def _wake_rewritten(core: Any, tags: Sequence[str]) -> None:
    """Make vLLM's wake-up call the workers' method for weights that will be rewritten.

    A separate method is needed because vLLM's executor passes only known tags to the workers.
    """
    executor = core.model_executor
    original = executor.collective_rpc

    @functools.wraps(original)
    def redirected(method: Any, *arguments: Any, **named: Any) -> Any:
        chosen = WAKE_REWRITTEN if method == "wake_up" else method
        return original(chosen, *arguments, **named)

    executor.collective_rpc = redirected
    try:
        core.wake_up(tags)
    except Exception:
        guard_of(core).wake_failed()
        raise
    finally:
        del executor.collective_rpc
    guard_of(core).woken_without_contents()


def _answered(
    core: Any,
    operation: str,
    tags: Sequence[str],
    work: Callable[[SchedulerState], Any],
) -> Any:
    """Run a release or a resume, and return its `Answer`, which contains any failure.

    If `work` returns a future, the result is also a future, because the pause of vLLM's scheduler
    completes later. Errors that are not memsaver's own propagate, unless the workers reported a
    failure of this call.

    Args:
        core: the engine core.
        operation: "release" or "resume".
        tags: the requested tags.
        work: the function that performs the operation; its argument is the state before the
            operation.
    """
    before = _state_of(core)
    number = before.last.number if before.last else 0

    def begin() -> Any:
        check_known(tags, RELEASE_ORDER)
        return work(before)

    def end(result: Callable[[], Any]) -> dict[str, Any]:
        return _answer(core, operation, tags, number, result)

    begun: Future[Any] = Future()
    settle(begun, begin)
    pending = None if begun.exception() else begun.result()
    if not isinstance(pending, Future):
        return end(begun.result)
    answer: Future[Any] = Future()
    pending.add_done_callback(lambda done: settle(answer, lambda: end(done.result)))
    return answer


def _answer(
    core: Any,
    operation: str,
    tags: Sequence[str],
    number: int,
    result: Callable[[], Any],
) -> dict[str, Any]:
    """Return the `Answer` to a completed release or resume; `result` raises its error, if any."""
    try:
        result()
    except (ConfigError, MemsaverError) as error:
        return asdict(_refused(core, operation, tags, error, number))
    except Exception:
        answer = _state_of(core).last
        if answer is None or answer.number == number or answer.failure is None:
            raise
        return asdict(answer)
    state = _state_of(core, measures=operation == "release")
    if state.last is None or state.last.number == number:
        return asdict(Answer(state.scheduler, operation, tuple(tags), state.released))
    return asdict(replace(state.last, released=state.released))


def _then(first: Any, work: Callable[[Any], Any]) -> Any:
    """Apply `work` to a result; for a future, return a future with the result of `work`."""
    if not isinstance(first, Future):
        return work(first)
    last: Future[Any] = Future()
    first.add_done_callback(lambda done: settle(last, lambda: work(done.result())))
    return last


def _refused(
    core: Any, operation: str, tags: Sequence[str], error: MemsaverError, number: int
) -> Answer:
    """Return the answer to a failed call: the workers' own answer if they sent one."""
    state = _state_of(core)
    if state.last is not None and state.last.number > number and state.last.failure is not None:
        return state.last
    return Answer(
        state.scheduler,
        operation,
        tuple(tags),
        state.released,
        failure=Failure.of(error),
        number=number,
    )


def _end(core: Any, complete: bool = False) -> Any:
    """End the update in the workers. If the core is idle, discard old encoder outputs."""
    rows = core.model_executor.collective_rpc(END)
    if complete and is_good([RankCheck.from_fields(row) for row in rows[0]]):
        guard_of(core).loaded()
    if is_idle(core):
        core.reset_encoder_cache()
    return rows[0]


_ANSWERS: dict[str, Callable[..., Any]] = {
    INFO: _info,
    STATE: _state,
    RELEASE: _release,
    RESUME: _resume,
    END: _end,
    VERSION: _set_version,
}
