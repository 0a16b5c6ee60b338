"""Runs weight updates in SGLang's scheduler processes so that failures do not crash the engine.

SGLang only logs names that the model does not use. An exception in a loader, for example because of
a shape mismatch, crashes the engine. With these hooks, each rank runs SGLang's own handler, and the
ranks of a group exchange their results before any rank replies. An update that fails on one rank
fails on all ranks.

For an update with a `VerificationRequest`, each rank runs the checks of `LoadCheck` around the
handler, and then waits for its device, because the sender may overwrite its memory as soon as it
receives the reply. The reply contains the results of all ranks. For any other update, each rank
runs the checks of `PlainCheck`; if they succeed, the reply is SGLang's own.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from memsaver.errors import MemsaverError

from ..engine.errors import EngineError
from ..engine.messages import Failure
from ..engine.ranks import Group
from ..engine.weights.checks import RankCheck, is_good
from ..engine.weights.load_check import LoadCheck
from ..engine.weights.plain_check import Found, Known, PlainCheck, verdict
from . import lost_weights, settings
from .pipeline import can_defer, defer
from .places import Place, group_of, holds_model, place_of, stage_group_of, uses_saver
from .protocol import text_of_checks, verification_of
from .updaters import SchedulerAsUpdater, scheduler_of

__all__ = [
    "everywhere",
    "load_broadcast",
    "load_given",
    "load_tensors",
    "load_through",
    "plain",
    "plain_load",
]

_DIRECT = "direct"
_TENSORS = "UpdateWeightsFromTensorReqOutput"
_BROADCAST = "UpdateWeightsFromDistributedReqOutput"
_KNOWN = "_memsaver_known_weights"  # an attribute of a scheduler
_WHEN_BUSY = 'end the requests first, or pass pause="abort"; nothing was loaded'
_logger = logging.getLogger("memsaver.sglang")


def load_tensors(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Wrap `SchedulerWeightUpdaterManager.update_weights_from_tensor`."""
    return _load(original, updater, request, _TENSORS, has_barrier=True)


def load_broadcast(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Wrap `SchedulerWeightUpdaterManager.update_weights_from_distributed`."""
    return _load(original, updater, request, _BROADCAST, has_barrier=False)


def load_given(
    original: Callable[..., Any], runner: Any, named_tensors: Any, load_format: str | None = None
) -> Any:
    """Wrap `WeightUpdater.update_weights_from_tensor`."""
    check = _current[-1] if _current else None
    if not isinstance(check, LoadCheck) or load_format != _DIRECT:
        return load_through(original, runner, named_tensors, load_format)
    direct = sys.modules[type(runner).__module__]._model_load_weights_direct
    model = runner.get_model()
    loaded = check.run(
        model,
        list(named_tensors),
        lambda _: original(runner, named_tensors, load_format),
        lambda given: direct(model, given),
    )
    return (False, check.trouble) if check.trouble else loaded


def load_through(original: Callable[..., Any], runner: Any, *args: Any) -> Any:
    """Wrap the methods of a runner's `WeightUpdater` that call the model's loader.

    A scheduler with a draft model has a second runner.
    """
    check = _current[-1] if _current else None
    if check is None:
        return original(runner, *args)
    with check.around_loader(runner.get_model()):
        result = original(runner, *args)
    if isinstance(check, LoadCheck) and check.trouble:
        return False, check.trouble
    return result


def _load(
    original: Callable[..., Any], updater: Any, request: Any, kind: str, *, has_barrier: bool
) -> Any:
    """Run SGLang's handler with the requested checks. Collective over the group.

    Args:
        original: the handler.
        updater: the handler's object.
        request: the SGLang request, which may contain a verification request.
        kind: the name of SGLang's class for the handler's reply.
        has_barrier: whether the handler ends with a barrier of the group, at which the other ranks
            would wait for a failed rank.
    """
    place = place_of(updater)
    output_of = _message(kind)
    try:
        verification = verification_of(getattr(request, "rid", None))
        if verification is not None:
            verification.check_ranks(place.size)
    except EngineError as error:  # on all ranks, because their requests are equal
        return output_of(success=False, message=str(error))
    request = place.own(request)
    if verification is None:
        return plain_load(kind, has_barrier=has_barrier)(original, updater, request)
    check = LoadCheck(verification, place.rank)

    def loaded() -> dict[str, Any]:
        _load_checked(original, updater, request, has_barrier, check)
        return asdict(check.found())

    def failed(error: BaseException) -> dict[str, Any]:
        check.fail(error)
        return asdict(check.found())

    def work(refusal: MemsaverError | None = None) -> Any:
        if refusal is None:
            # A signal's exception would be raised after the handler's own barrier, and this rank
            # would then call the barrier a second time.
            group = group_of(updater)
            rows = group.collect(loaded, failed, uninterrupted=has_barrier)
            checks = [RankCheck.from_fields(fields) for fields in rows]
        else:  # on all ranks, for the same reason
            check.fail(refusal)
            checks = [check.found()]
        if is_good(checks):
            lost_weights.loaded(updater, request)
        return output_of(success=is_good(checks), message=text_of_checks(checks))

    if place.stages == 1:
        return work()
    return defer(scheduler_of(updater), request, work, _WHEN_BUSY)


def _load_checked(
    original: Callable[..., Any], updater: Any, request: Any, has_barrier: bool, check: LoadCheck
) -> None:
    """Run SGLang's handler with checks, and wait for the device.

    An exception is recorded as a failure. An interrupt or an exit is also raised again.
    """
    _current.append(check)
    done, message = False, ""
    try:
        with _flushing_past_waiting(updater):
            output = original(updater, request)
        done, message = output.success, output.message
    except BaseException as error:
        _logger.exception("a weight update failed")
        check.fail(error)
        if has_barrier:
            _pass_barrier(Group(updater.tp_cpu_group))
        if not isinstance(error, Exception):
            raise
    finally:
        _current.pop()
    if not done and not check.trouble:
        check.failure = check.failure or Failure("EngineError", message)
    check.synchronize()


def plain(kind: str, *, has_barrier: bool, ends_session: bool = False) -> Callable[..., Any]:
    """Return a hook that wraps an updater's handler and ignores verification requests.

    Args:
        kind, has_barrier: see `_load`.
        ends_session: whether a failure ends the updater's session (SGLang 0.5.21).
    """

    def hook(original: Callable[..., Any], updater: Any, request: Any) -> Any:
        # SGLang refuses to begin a session within another one, which stays open.
        session = lost_weights.session_of(updater)
        stays = kind.startswith("Begin") and session is not None
        output = _load_plainly(original, updater, request, has_barrier, _message(kind))
        if ends_session and not output.success and not stays:
            lost_weights.end_update(updater)
        elif kind.startswith("End") and output.success:
            lost_weights.session_ended(updater, session, request)
        return output

    return hook


def plain_load(kind: str, *, has_barrier: bool) -> Callable[..., Any]:
    """Return a hook around an updater's handler that loads weights without a verification request.

    If the update fails in one stage of a pipeline, it fails in all stages. If the stages cannot
    work at the same time (see `can_defer` and `has_local_control`), each stage replies
    independently, as in SGLang, and accepts names that it does not use.

    Args:
        kind, has_barrier: see `_load`.
    """
    own = plain(kind, has_barrier=has_barrier)

    def hook(original: Callable[..., Any], updater: Any, request: Any) -> Any:
        scheduler = scheduler_of(updater)
        if place_of(updater).stages == 1 or not can_defer(scheduler):
            return own(original, updater, request)

        def work(refusal: MemsaverError | None) -> Any:
            output_of = _message(kind)
            if refusal is not None:
                return output_of(success=False, message=str(refusal))
            ranks = group_of(updater)
            return _load_plainly(original, updater, request, has_barrier, output_of, ranks)

        return defer(scheduler, request, work, _WHEN_BUSY)

    return hook


def everywhere(kind: str, hook: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a hook around an updater's handler that must succeed on all stages of a pipeline.

    An engine for which `has_local_control` is true is an exception; see `plain_load`.

    Args:
        kind: see `_load`.
        hook: a hook that runs the handler; None runs it with this process's rank in a group.
    """

    def handle(original: Callable[..., Any], updater: Any, request: Any) -> Any:
        place = place_of(updater)

        def handled() -> Any:
            if hook is None:
                return original(updater, _joining(place, request))
            return hook(original, updater, request)

        def work(refusal: MemsaverError | None) -> Any:
            if refusal is not None:
                return _message(kind)(success=False, message=str(refusal))
            output = None

            def result() -> dict[str, Any]:
                nonlocal output
                output = handled()
                return {"success": bool(output.success), "message": str(output.message)}

            rows = group_of(updater).collect(result, _failed)
            bad = [one for one in rows if not one["success"]]
            return _message(kind)(success=False, message=bad[0]["message"]) if bad else output

        if place.stages == 1:
            return handled()
        return defer(scheduler_of(updater), request, work, _WHEN_BUSY)

    return handle


def _failed(error: BaseException) -> dict[str, Any]:
    _logger.error("a request about weights failed", exc_info=error)
    failure = Failure.of(error)
    return {"success": False, "message": f"{failure.kind}: {failure.message}"}


def _joining(place: Place, request: Any) -> Any:
    return place.joining(request) if hasattr(request, "rank_offset") else request


def _load_plainly(
    original: Callable[..., Any],
    updater: Any,
    request: Any,
    has_barrier: bool,
    output_of: Any,
    stages: Group | None = None,
) -> Any:
    """Run SGLang's handler; return its reply, or the failure of any rank. Collective.

    Args:
        original, updater, request, has_barrier: see `_load`.
        output_of: the class of the handler's reply.
        stages: the ranks of all stages of a pipeline, if they run the handler at the same time;
            None exchanges results only within `stage_group_of`.
    """
    group = stages or stage_group_of(updater)
    known = _known_to(updater)
    is_watched = uses_saver(updater) and holds_model(updater, stages is not None)
    check = PlainCheck(known, watches=settings.updates_are_checked() and is_watched)
    output, success, message = None, False, ""

    def loaded() -> dict[str, Any]:
        nonlocal output, success, message
        _current.append(check)
        try:
            with _watched(updater, request, check):
                output = original(updater, request)
        except BaseException:
            _logger.exception("a weight update failed")
            if has_barrier:
                _pass_barrier(Group(updater.tp_cpu_group))
            raise
        finally:
            _current.pop()
        success = bool(getattr(output, "success", False))
        message = str(getattr(output, "message", ""))
        return asdict(Found(group.rank, success, message, None, check.unused, check.partial))

    def failed(error: BaseException) -> dict[str, Any]:
        return asdict(Found(group.rank, failure=Failure.of(error)))

    rows = group.collect(loaded, failed, uninterrupted=has_barrier)
    trouble = verdict([Found.from_fields(row) for row in rows])
    if output is not None and success and not trouble:
        known |= check.seen
        lost_weights.loaded(updater, request)
        return output
    if success:
        _logger.error("a weight update failed: %s", trouble)
    return output_of(success=False, message=trouble or message)


def _pass_barrier(group: Group) -> None:
    """Run the barrier of a handler that failed before reaching it.

    A failure of the barrier itself is only logged.
    """
    try:
        group.barrier()
    except Exception:
        _logger.exception("the ranks did not reach the barrier after a failed weight update")


def _watched(
    updater: Any, request: Any, check: PlainCheck
) -> contextlib.AbstractContextManager[None]:
    """Observe the model's loader in older versions of SGLang, whose runners have no hooks."""
    if not isinstance(updater, SchedulerAsUpdater) or hasattr(request, "model_path"):
        return contextlib.nullcontext()
    return check.around_loader(updater.tp_worker.model_runner.model)


def _known_to(updater: Any) -> Known:
    """Return the names and shapes in a scheduler's successful updates."""
    owner = scheduler_of(updater)
    if not hasattr(owner, _KNOWN):
        setattr(owner, _KNOWN, set())
    known: Known = getattr(owner, _KNOWN)
    return known


@contextlib.contextmanager
def _flushing_past_waiting(updater: Any) -> Iterator[None]:
    """During the block, allow a paused scheduler to flush its cache while requests wait.

    Waiting requests have no data in the KV cache, because the pause dropped it. SGLang 0.5.16
    rejects the flush, so these requests would continue with values computed by the old weights.
    Later versions flush the cache.
    """
    scheduler = scheduler_of(updater)
    if not getattr(scheduler, "_engine_paused", False) or (
        "ignore_waiting" in inspect.signature(updater.is_fully_idle).parameters
    ):
        yield
        return
    flush = updater.flush_cache

    def past_waiting(*args: Any, **named: Any) -> Any:
        waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
        try:
            return flush(*args, **named)
        finally:
            scheduler.waiting_queue = waiting

    updater.flush_cache = past_waiting
    try:
        yield
    finally:
        updater.flush_cache = flush


def _message(kind: str) -> Any:
    from sglang.srt.managers import io_struct

    return getattr(io_struct, kind)


_current: list[
    LoadCheck | PlainCheck
] = []  # the checks of the update in progress; a scheduler runs one update at a time
