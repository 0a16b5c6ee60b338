"""Makes a release or a resume of data-parallel replicas take effect on all replicas or on none.

The tokenizer manager, which receives the answers of all replicas, checks before a release that all
replicas are idle. After a failure, it sends the opposite request with UNDO as its `rid`. Each
replica then undoes its own last release or resume, unless that one failed or changed nothing.
Undoing a release restores the contents that have a backup.

A replica cannot undo a resume if a generation that was paused before the release has continued.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ..engine.answers import last_answer
from ..engine.errors import EngineBusyError
from ..engine.messages import Answer, SchedulerState, error_of
from ..engine.tags import RELEASE_ORDER, WEIGHTS
from .protocol import REWRITTEN, UNDO, UNDO_REWRITTEN, answers_of

__all__ = ["busy_replica", "to_undo", "undo"]


def busy_replica(states: Sequence[SchedulerState], tags: Collection[str]) -> EngineBusyError | None:
    """Return an error if some replicas would refuse to release tags because they are busy."""
    if all(state.idle or set(tags) <= set(state.released) for state in states):
        return None
    return EngineBusyError(
        "a replica of the engine has requests in flight: memory can be released after they end; "
        "wait for them, or abort them; no replica has changed"
    )


async def undo(
    manager: Any, operation: str, obj: Any, answers: Sequence[Answer]
) -> tuple[Sequence[Answer], str]:
    """Undo an operation on the replicas on which it succeeded. Raises nothing.

    Args:
        manager: the tokenizer manager.
        operation: either "release" or "resume", which failed on some replicas.
        obj: the request.
        answers: the replicas' answers.

    Returns:
        The replicas' current answers, and the end of the error's message.
    """
    changed = {tag for one in answers if one.failure is None for tag in one.tags}
    tags = [tag for tag in RELEASE_ORDER if tag in changed]
    if not tags:
        return answers, ""
    try:
        from sglang.srt.managers.io_struct import (
            ReleaseMemoryOccupationReqInput,
            ResumeMemoryOccupationReqInput,
        )

        request: Any
        if operation == "release":
            request = ResumeMemoryOccupationReqInput(tags=tags)
            communicator = manager.resume_memory_occupation_communicator
        else:
            request = ReleaseMemoryOccupationReqInput(tags=tags)
            communicator = manager.release_memory_occupation_communicator
        was_rewritten = operation == "resume" and getattr(obj, "rid", None) == REWRITTEN
        request.rid = UNDO_REWRITTEN if was_rewritten else UNDO
        now = answers_of(await communicator(request))
    except Exception as error:
        return answers, f"; other replicas could not undo their {operation}: {error}"
    before = {one.scheduler: one.number for one in answers}
    undone = [one for one in now if one.number > before.get(one.scheduler, 0)]
    failed = error_of(undone)
    if failed is not None:
        return now, f"; other replicas could not undo their {operation}: {failed}"
    text = f"; other replicas have undone their {operation}"
    if any(WEIGHTS in one.lost for one in undone):
        text += ", but the contents of their weights are lost"
    return now, text


def to_undo(scheduler: Any, operation: str) -> tuple[str, ...]:
    """Return the tags to which a replica must apply an operation to undo its last one."""
    last = last_answer(scheduler)
    if last is None or last.failure is not None or last.operation == operation:
        return ()
    return last.tags
