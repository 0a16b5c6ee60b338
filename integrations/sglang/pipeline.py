"""Runs a weight update, a release or a resume in all stages of a pipeline at the same time.

SGLang's stages handle a request one after the other: a stage handles the request and replies, and
only then sends the request to the next stage. Therefore, a stage's handler must not wait for a
later stage. Nor would the reply, which only the first stage sends, contain the later stages'
results. With these hooks, a stage first forwards the request and then does the work. During the
work, all stages exchange their results.

The work must not begin while a batch is in the pipeline. Otherwise, a later stage might wait for
the batch's data from an earlier stage that itself waits for the later stage. All stages decide in
the same round of their loops and from the same state, so their decisions are identical.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memsaver.errors import ConfigError, MemsaverError

from ..engine.errors import EngineBusyError
from ..engine.hooking import INSTALLED
from .guard import guard_of
from .places import effective_arguments

__all__ = ["after_input", "after_send", "can_defer", "defer", "is_installed", "is_waiting"]

Work = Callable[[MemsaverError | None], Any]

_WAITING = "_memsaver_waiting"  # an attribute of a scheduler: a list of `_Deferred`
_ROUNDS = 200  # the maximum number of rounds for which work waits until the pipeline has no batch


class _Deferred:
    """A request whose work has not begun.

    Attributes:
        request: the SGLang request.
        work: a function that returns the reply, or None for no reply; its argument is None, or the
            reason why the function must do nothing.
        busy: the error to report if the pipeline does not become empty.
        rounds: the number of rounds for which the work may still wait.
    """

    def __init__(self, request: Any, work: Work, busy: EngineBusyError) -> None:
        self.request, self.work, self.busy, self.rounds = request, work, busy, _ROUNDS


def defer(scheduler: Any, request: Any, work: Work, then: str) -> Any:
    """Do the work once the request has been sent to the next stage, and then send the reply.

    Args:
        scheduler: this stage's scheduler.
        request: the SGLang request.
        work: see `_Deferred`.
        then: the end of the error message for a busy engine, with advice and the resulting state.

    Returns:
        None, which the handler must return so that SGLang does not send a reply yet.
    """
    if not can_defer(scheduler):  # nothing would run the work
        mode = _disaggregation(scheduler)
        return work(
            ConfigError(
                f"weights of an engine with pp_size and disaggregation_mode={mode} cannot be "
                "updated: its stages run other loops"
            )
        )
    busy = EngineBusyError(
        "the engine has requests in flight, but the stages of a pipeline can do this only while "
        f"there are none: {then}"
    )
    vars(scheduler).setdefault(_WAITING, []).append(_Deferred(request, work, busy))
    return None


def can_defer(scheduler: Any) -> bool:
    """Return whether a scheduler's loop runs deferred work."""
    return is_installed(scheduler) and _disaggregation(scheduler) == "null"


def is_waiting(scheduler: Any) -> bool:
    """Return whether an earlier request's work has not begun."""
    return bool(vars(scheduler).get(_WAITING))


def _disaggregation(scheduler: Any) -> str:
    return getattr(effective_arguments(scheduler), "disaggregation_mode", "") or "null"


def is_installed(scheduler: Any) -> bool:
    """Return whether memsaver's hooks are installed in a scheduler's loop."""
    hooked: frozenset[str] = getattr(type(scheduler), INSTALLED, frozenset())
    return hooked.issuperset(("process_input_requests", "_pp_send_pyobj_to_next_stage"))


def after_send(result: Any, scheduler: Any, *_: Any) -> Any:
    """Run deferred work after `_pp_send_pyobj_to_next_stage`, on every stage except the last."""
    _run(scheduler)
    return result


def after_input(result: Any, scheduler: Any, *_: Any) -> Any:
    """Run deferred work after `process_input_requests`, on the last stage."""
    if is_waiting(scheduler) and scheduler.pp_group.is_last_rank:
        _run(scheduler)
    return result


def _run(scheduler: Any) -> None:
    waiting: list[_Deferred] = vars(scheduler).get(_WAITING, [])
    while waiting:
        refusal = None
        if any(getattr(scheduler, "mbs", ())):
            waiting[0].rounds -= 1
            if waiting[0].rounds > 0:
                return
            refusal = waiting[0].busy
        one = waiting.pop(0)
        guard = guard_of(scheduler)
        if guard is not None and guard.refuses(one.request):  # an earlier release has run since
            reply = guard(one.request)
        else:
            reply = one.work(refusal)
        if reply is not None:
            _send(scheduler, reply, one.request)


def _send(scheduler: Any, reply: Any, request: Any) -> None:
    send = getattr(scheduler, "send_control_output", None)  # 0.5.23
    if send is None:
        send = getattr(scheduler, "ipc_channels", scheduler).send_to_tokenizer.send_output
    send(reply, request)
