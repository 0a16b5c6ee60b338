"""Releases and resumes memory in SGLang's schedulers, on all ranks or none, without fatal errors.

SGLang's handlers trust their caller: they assert that the engine is idle, raise a KeyError for a
tag that is not released, and propagate the saver's exceptions. Each of these errors crashes the
engine. The hooks in this module wrap these handlers. The hooks skip tags that are already in the
requested state, reject fatal calls, and do the saver's work themselves. The ranks of a
tensor-parallel group and of all pipeline stages exchange failures before any rank continues.
SGLang's own handlers receive a saver that does nothing, and process only caches, model buffers,
queues and bookkeeping.

| event | state afterwards, on every rank |
|---|---|
| a release of released tags, a resume of mapped tags | unchanged; SGLang's own error, if any |
| the engine is busy, or a tag is unknown | unchanged |
| a release without the guard against requests (`unguarded.check_release`) | unchanged |
| the engine's replicas receive requests separately (`has_local_control`) | unchanged |
| a release is rejected before it runs | mapped, with contents; the KV cache is flushed |
| a release fails later | mapped; contents without a backup may be lost, the KV cache is flushed |
| a resume fails | still released, with backups; the same call may be repeated |

If the rollback also fails on some ranks, the tags count as released, and the answer names the tags
that still have memory on a rank (`Answer.held`). The next release of the tags releases this memory,
and the next resume uses it.

The result is part of the answer to the tokenizer manager, whose methods return the answers of all
schedulers or raise an error. If data-parallel replicas differ in their results, the tokenizer
manager makes the successful ones undo their operation (`undoing`). The server information also
contains the result. If the stages of a pipeline cannot work at the same time (see
`pipeline.can_defer`), each stage decides independently, and only the first stage's answer is sent.
If an engine uses a different saver, the hooks only run the checks. If SGLang's handlers lack the
expected interface, only releases without the guard are rejected.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any

from memsaver._memory.sharing.wire import domain
from memsaver.errors import ConfigError, InvalidStateError, MemsaverError

from ..engine import moves
from ..engine.answers import last_answer, name_of
from ..engine.messages import RankReport, SchedulerState
from ..engine.ranks import Figures, Group, first_failure
from ..engine.tags import RELEASE_ORDER, RESUME_ORDER, WEIGHTS
from . import draft_weights, guard, handlers, leftovers, lost_weights, pipeline, unguarded
from .answering import Answering, run_unexpected
from .places import LOCAL_CONTROL, effective_arguments, group_of, has_local_control, place_of
from .protocol import IDLE, REWRITTEN, UNDO, UNDO_REWRITTEN
from .rollbacks import lost_tags, troubles, what_is_left
from .undoing import to_undo
from .updaters import resume_of, scheduler_of, updater_of

__all__ = ["add_state", "release", "resume"]

_WHEN_BUSY = "end or abort the requests first; nothing has changed"
_logger = logging.getLogger("memsaver.sglang")


def release(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Wrap `SchedulerWeightUpdaterManager.release_memory_occupation`."""
    return _answered("release", RELEASE_ORDER, _release, original, updater, request)


def resume(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Wrap `SchedulerWeightUpdaterManager.resume_memory_occupation`."""
    return _answered("resume", RESUME_ORDER, _resume, original, updater, request)


def _answered(
    operation: str,
    order: Sequence[str],
    work: Callable[..., Any],
    original: Callable[..., Any],
    updater: Any,
    request: Any,
) -> Any:
    """Check a release or a resume, then call `work(original, updater, request, tags, answer)`.

    A pipeline's stages call `work` after sending the request to the next stage. The result is then
    None, and the reply is sent later. A resume of mapped tags does not involve the other stages, so
    its answer waits only for earlier requests, not for a batch.
    """
    if handlers.is_running(updater):
        return original(updater, request)
    if not handlers.is_as_expected(updater):
        return run_unexpected(original, updater, request, operation)
    scheduler = scheduler_of(updater)
    together = place_of(updater).stages > 1 and pipeline.can_defer(scheduler)
    group = group_of(updater) if together else Group(updater.tp_cpu_group)

    def answering() -> Answering:
        return Answering(updater, operation, group, is_idle=_rid(request) == IDLE)

    try:
        asked = handlers.requested_tags(request, order)
    except ConfigError as error:
        return answering().refused(error)
    if _rid(request) in (UNDO, UNDO_REWRITTEN):
        done = to_undo(scheduler, operation)
        asked = [tag for tag in asked if tag in done]
        if not asked:
            return answering().repeated()

    def is_resumed() -> bool:
        return operation == "resume" and updater.offload_tags.isdisjoint(asked)

    def answered(refusal: MemsaverError | None = None) -> Any:
        answer = answering()
        try:
            # Releases and resumes of tags that still have memory may be repeated.
            released = updater.offload_tags - (answer.held if operation == "release" else set())
            handlers.check_states(request, operation, asked, released)
            if refusal is not None and not is_resumed():
                raise refusal
        except (ConfigError, InvalidStateError) as error:
            return answer.refused(error)
        output = work(original, updater, request, asked, answer)
        if together and operation == "resume" and (found := guard.guard_of(scheduler)) is not None:
            found.after_resume()  # the guard itself has seen only the deferral
        return output

    if has_local_control(scheduler):  # a resume of mapped tags needs no other rank
        return answered(
            ConfigError(
                f"{operation} of {', '.join(asked)}: with SGLang's option {LOCAL_CONTROL}, "
                "replicas receive the request at different times, and could wait for each other "
                "indefinitely; nothing has changed; turn the option off, or the feature for which "
                "SGLang sets it"
            )
        )
    if together and (pipeline.is_waiting(scheduler) or not is_resumed()):
        return pipeline.defer(scheduler, request, answered, _WHEN_BUSY)
    return answered()


def _rid(request: Any) -> Any:
    return getattr(request, "rid", None)


def _release(
    original: Callable[..., Any],
    updater: Any,
    request: Any,
    asked: Sequence[str],
    answer: Answering,
) -> Any:
    group = answer.group
    tags = [tag for tag in asked if tag not in updater.offload_tags]
    if not moves.are_memsavers(RELEASE_ORDER):
        return _release_by_another(original, updater, request, tags, answer)

    # Released tags may still have memory on a rank: see the end of `_resume`.
    ranks = group.attempt(
        lambda: _check_release(updater) if tags or moves.is_mapped(asked) else None
    )
    if first_failure(ranks):
        return answer.failed(asked, ranks)
    if tags:
        ranks = group.attempt(lambda: _prepare_release(original, updater, request, tags))
    if not first_failure(ranks):
        ranks = moves.pause(group, asked, dict.fromkeys(_rewritten(request), "none"))
        _record_moved(updater, ranks)
    if not first_failure(ranks):
        changed = [tag for tag in asked if tag in tags or _is_moved(tag, ranks)]
        if _discards_weights(updater, request, changed):
            lost_weights.lose(updater)
        ranks = leftovers.after_release(updater, group, ranks)
        is_undo = _rid(request) == UNDO_REWRITTEN
        lost = set(changed).intersection(_rewritten(request)) if is_undo else set()
        return answer.done(changed, ranks, held=answer.held - set(asked), lost=lost)
    if not tags:
        return answer.failed(
            asked, ranks, "they count as released, but some ranks still have their memory"
        )

    # Some ranks may have released memory, so all of them map it again. If a rank cannot do so, the
    # tags count as released: on a rank that has them mapped, the next resume does nothing.
    undone = moves.resume(group, tags)
    updater.offload_tags.update(tags)  # even if the handler failed before it added them
    if first_failure(undone):
        if _discards_weights(updater, request, tags):
            lost_weights.lose(updater)
        then = (
            "memory that other ranks had released could not be mapped again, so the tags count as "
            f"released: resume them; {troubles(undone)}"
        )
        return answer.failed(tags, ranks, then, held=answer.held | set(tags))
    _restore(updater, request, tags)
    lost = lost_tags(undone, _discards_weights(updater, request, tags))
    if WEIGHTS in lost:
        lost_weights.end_update(updater)
    return answer.failed(tags, ranks, what_is_left(lost), lost=lost)


def _check_release(updater: Any) -> None:
    """Raise an error if a release could crash the engine, now or during a later request."""
    unguarded.check_release(scheduler_of(updater))
    handlers.check_idle(updater)


def _rewritten(request: Any) -> tuple[str, ...]:
    """Return the tags whose contents a request declares to be no longer needed.

    The result is empty if there is a draft model, because it may share the tag, and its weights are
    not sent again.
    """
    is_declared = _rid(request) in (REWRITTEN, UNDO_REWRITTEN)
    is_rewritten = is_declared and not draft_weights.is_loaded()
    return (WEIGHTS,) if is_rewritten else ()


def _discards_weights(updater: Any, request: Any, tags: Collection[str]) -> bool:
    """Return whether a release of tags discards the contents of the weights."""
    arguments = effective_arguments(scheduler_of(updater))
    kept = getattr(arguments, "enable_weights_cpu_backup", False)
    return WEIGHTS in tags and (not kept or WEIGHTS in _rewritten(request))


def _prepare_release(
    original: Callable[..., Any], updater: Any, request: Any, tags: Sequence[str]
) -> None:
    """Run SGLang's part, and remove the copy of the model's buffers from the device."""
    handlers.run(original, updater, request, tags)
    if WEIGHTS in tags:
        handlers.move_stash_to_host(updater)
        draft_weights.drop_copy(updater)


def _release_by_another(
    original: Callable[..., Any],
    updater: Any,
    request: Any,
    tags: Sequence[str],
    answer: Answering,
) -> Any:
    """Release memory with a different saver, for which memsaver only runs the checks."""
    if not tags:
        return answer.done([], [])

    def check() -> Figures:
        _check_release(updater)
        return Figures()

    ranks = answer.group.attempt(check)
    if first_failure(ranks):
        return answer.failed(tags, ranks)
    original(updater, handlers.request_for(request, tags))
    if _discards_weights(updater, request, tags):
        lost_weights.lose(updater)
    return answer.done(tags, ranks)


def _resume(
    original: Callable[..., Any],
    updater: Any,
    request: Any,
    asked: Sequence[str],
    answer: Answering,
) -> Any:
    group = answer.group
    tags = [tag for tag in asked if tag in updater.offload_tags]
    if not tags:
        return answer.done([], [])
    were_lost = WEIGHTS in tags and lost_weights.are_lost(scheduler_of(updater))
    if not moves.are_memsavers(RESUME_ORDER):
        original(updater, handlers.request_for(request, tags))
        lost_weights.resumed(updater, without_contents=False)
        lost = {WEIGHTS} if were_lost and _rid(request) == UNDO else set()
        return answer.done(tags, group.attempt(Figures), lost=lost)

    stash = handlers.stash_of(updater)
    rewritten = [tag for tag in _rewritten(request) if tag in tags]
    failed, ranks = leftovers.resume(
        updater, group, tags, lambda: moves.resume(group, tags, rewritten)
    )
    if not ranks:
        return answer.failed(tags, failed)
    then = "on every rank they are released as before; free memory and resume them again"
    if first_failure(failed):  # raised for NCCL's communicators; its message contains advice
        then = "on every rank they are released as before"
    else:
        failed = ranks
    if not first_failure(failed):
        failed = group.attempt(lambda: handlers.run(original, updater, request, tags))
    if not first_failure(failed):
        lost = lost_tags(ranks, were_lost) if _rid(request) == UNDO else set()
        lost_weights.resumed(updater, without_contents=WEIGHTS in rewritten)
        return answer.done(tags, ranks, held=answer.held - set(tags), lost=lost)
    # Memory that was resumed without its contents must not be backed up.
    if rewritten:
        lost_weights.lose(updater)
    again = moves.pause(group, tags, dict.fromkeys(rewritten, "none"))
    updater.offload_tags.update(tags)
    if WEIGHTS in tags:
        handlers.keep_stash(updater, stash)
    if first_failure(again):
        # A rank that cannot release the memory again stays mapped, which the next call accepts.
        then = (
            "they count as released, and ranks that had mapped memory could not release it: "
            f"{troubles(again)}; release or resume them again"
        )
        return answer.failed(tags, failed, then, held=answer.held | set(tags), lost=rewritten)
    leftovers.after_release(updater, group, again)
    if rewritten:
        then += f", and then load {', '.join(rewritten)}: its contents are lost on some ranks"
    return answer.failed(tags, failed, then, held=answer.held - set(tags), lost=rewritten)


def add_state(result: Any, scheduler: Any, *_: Any) -> Any:
    """Add the state of the memory to the result of `Scheduler.get_internal_state`, as "memsaver".

    The state is omitted if SGLang's handlers are not as expected, or if requests cannot be refused.
    Callers then treat the engine as unprotected.
    """
    try:
        updater = updater_of(scheduler)
        if handlers.is_as_expected(updater) and not unguarded.has_failed(scheduler):
            state = SchedulerState(
                name_of(scheduler),
                tuple(sorted(updater.offload_tags)),
                handlers.is_idle(updater),
                last_answer(scheduler),
                guard.when_asleep(scheduler),
                _update_ranks(updater),
                domain(),
                (WEIGHTS,) if lost_weights.are_lost(scheduler) else (),
            )
            result.internal_state["memsaver"] = asdict(state)
    except Exception as error:
        _log_once(f"{type(error).__name__}: {error}")
    return result


def _update_ranks(updater: Any) -> int:
    """Return the number of ranks that receive weights in an update; see `SchedulerState`."""
    place = place_of(updater)
    reaches_stages = place.stages == 1 or pipeline.is_installed(scheduler_of(updater))
    return place.size if reaches_stages else place.width


@functools.cache
def _log_once(why: str) -> None:
    _logger.error("memsaver cannot report the state of SGLang's memory: %s", why)


def _restore(updater: Any, request: Any, tags: Sequence[str]) -> None:
    """Run SGLang's part of a resume after a failed release. Called on every rank or on none.

    The function processes tags one by one, because a release may have failed before SGLang's part
    ran for some tags.
    """
    again = resume_of(updater)
    stashed = handlers.stash_of(updater) is not None
    for tag in [tag for tag in RESUME_ORDER if tag in tags]:
        if tag == WEIGHTS and not stashed:
            Group(updater.tp_cpu_group).barrier()  # at which the ranks with a stash wait
            continue
        try:
            handlers.run(again, updater, request, [tag])
        except Exception as error:
            _logger.warning("SGLang's part of a release of %s could not be undone: %s", tag, error)
    if WEIGHTS in tags:
        handlers.keep_stash(updater, None)
    updater.offload_tags.difference_update(tags)


def _record_moved(updater: Any, ranks: Sequence[RankReport]) -> None:
    """Record the tags that had memory on any rank, so that all ranks' guards use the same tags."""
    scheduler = scheduler_of(updater)
    moved = {tag for tag in RELEASE_ORDER if _is_moved(tag, ranks)}
    setattr(scheduler, guard.MOVED, moved.union(getattr(scheduler, guard.MOVED, ())))


def _is_moved(tag: str, ranks: Sequence[RankReport]) -> bool:
    return any(rank.device_bytes.get(tag, 0) for rank in ranks)
