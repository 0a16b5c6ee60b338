"""Verified weight updates in SGLang's scheduler processes, whose failures do not end the engine.

SGLang only logs names that the model does not use, and an exception raised in a loader (for
example, on a shape mismatch) ends the engine. For an update that carries a `VerificationRequest`,
each rank runs the checks of `LoadCheck` around SGLang's own handlers, and then waits for its
device: the sender may overwrite its memory as soon as it receives the answer. The answer contains
the results of all ranks of the group, even if their load failed. Updates without a request use
SGLang's handlers unchanged.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from ..engine.errors import EngineError
from ..engine.messages import Failure
from ..engine.ranks import Group
from ..engine.weights.checks import RankCheck, is_good
from ..engine.weights.load_check import LoadCheck
from .protocol import text_of_checks, verification_of

__all__ = ["load_broadcast", "load_given", "load_tensors", "load_through"]

_DIRECT = "direct"
_logger = logging.getLogger("memsaver.sglang")


def load_tensors(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Wrap `SchedulerWeightUpdaterManager.update_weights_from_tensor`."""
    return _load(original, updater, request, has_barrier=True)


def load_broadcast(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Wrap `SchedulerWeightUpdaterManager.update_weights_from_distributed`."""
    return _load(original, updater, request, has_barrier=False)


def load_given(
    original: Callable[..., Any], runner: Any, named_tensors: Any, load_format: str | None = None
) -> Any:
    """Wrap `WeightUpdater.update_weights_from_tensor`."""
    check = _current[-1] if _current else None
    if check is None or load_format != _DIRECT:
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
    return (False, check.trouble) if check.trouble else result


def _load(original: Callable[..., Any], updater: Any, request: Any, *, has_barrier: bool) -> Any:
    """Run SGLang's handler with the requested checks. Collective over the group.

    Args:
        original: the handler.
        updater: the object that has the handler.
        request: SGLang's request, which may carry a verification request.
        has_barrier: whether the handler ends with a barrier of the group, at which the
            other ranks wait for a rank that failed.
    """
    group = Group(updater.tp_cpu_group)
    try:
        verification = verification_of(getattr(request, "rid", None))
        if verification is not None:
            verification.check_ranks(group.size)
    except EngineError as error:  # on all ranks, because they have the same text
        return _output_of(has_barrier)(success=False, message=str(error))
    if verification is None:
        return original(updater, request)
    check = LoadCheck(verification, group.rank)
    _current.append(check)
    done, message = False, ""
    try:
        with _flushing_past_waiting(updater):
            output = original(updater, request)
        done, message = output.success, output.message
    except Exception as error:
        _logger.exception("an update of the weights failed")
        check.fail(error)
        if has_barrier:
            group.barrier()
    finally:
        _current.pop()
    if not done and not check.trouble:
        check.failure = check.failure or Failure("EngineError", message)
    check.synchronize()
    checks = [RankCheck.from_fields(fields) for fields in group.gather(asdict(check.found()))]
    return _output_of(has_barrier)(success=is_good(checks), message=text_of_checks(checks))


@contextlib.contextmanager
def _flushing_past_waiting(updater: Any) -> Iterator[None]:
    """Allow a paused scheduler to flush its cache while requests wait, for the block.

    Waiting requests have no data in the KV cache, because a pause dropped it. SGLang 0.5.16 rejects
    the flush, so that they would continue with results of the old weights; later versions flush.
    """
    scheduler: Any = getattr(updater, "scheduler", None)
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


def _output_of(tensors: bool) -> Any:
    from sglang.srt.managers import io_struct

    if tensors:
        return io_struct.UpdateWeightsFromTensorReqOutput
    return io_struct.UpdateWeightsFromDistributedReqOutput


_current: list[LoadCheck] = []  # of the update in progress; a scheduler runs one at a time
