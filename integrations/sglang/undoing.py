"""Make a release or a resume of data-parallel replicas take effect on all replicas or on none.

The tokenizer manager, which receives the answers of all replicas, checks before a release that all
replicas are idle. After a failure, it sends the opposite request with UNDO as its `rid`. Each
replica then undoes its own last release or resume, unless that one failed or changed nothing. See
also `..engine.undoing`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

from ..engine.answers import last_answer
from ..engine.errors import EngineBusyError
from ..engine.messages import Answer
from ..engine.shared_query import retrieve
from ..engine.undoing import changed_tags, description
from .places import effective_arguments, replicas_in
from .protocol import UNDO, answers_of, states_of

__all__ = ["check_idle", "to_undo", "undo"]


async def check_idle(manager: Any, tags: Collection[str]) -> None:
    """Raise an error if a release of tags would be refused by some replicas because they are busy.

    Args:
        manager: the tokenizer manager.
        tags: the tags to release.

    Raises:
        EngineBusyError: a replica has requests in flight; nothing has changed.
    """
    if replicas_in(effective_arguments(manager)) == 1:
        return
    query = asyncio.ensure_future(manager.get_internal_state())
    query.add_done_callback(retrieve)
    # Not cancelled with the caller: SGLang 0.5.12 would wait indefinitely in all later queries.
    for state in states_of(await asyncio.shield(query)):
        if not state.idle and not set(tags) <= set(state.released):
            raise EngineBusyError(
                "a replica of the engine has requests in flight: memory can be released after they "
                "end; wait for them, or abort them; no replica has changed"
            )


async def undo(
    manager: Any, operation: str, answers: Sequence[Answer]
) -> tuple[Sequence[Answer], str]:
    """Undo an operation on the replicas where it succeeded.

    Args:
        manager: the tokenizer manager.
        operation: either "release" or "resume", which failed on some replicas.
        answers: the replicas' answers.

    Returns:
        The replicas' current answers, and a description of their state for the error's message, ""
        if there was nothing to undo.
    """
    tags = changed_tags(answers)
    if not tags:
        return answers, ""
    from sglang.srt.managers.io_struct import (
        ReleaseMemoryOccupationReqInput,
        ResumeMemoryOccupationReqInput,
    )

    request: Any
    if operation == "release":
        request = ResumeMemoryOccupationReqInput()
        communicator = manager.resume_memory_occupation_communicator
    else:
        request = ReleaseMemoryOccupationReqInput()
        communicator = manager.release_memory_occupation_communicator
    request.tags, request.rid = tags, UNDO
    before = {one.scheduler: one.number for one in answers}
    now = answers_of(await communicator(request))
    undone = [one for one in now if one.number > before.get(one.scheduler, 0)]
    return now, description(operation, undone)


def to_undo(scheduler: Any, operation: str) -> tuple[str, ...]:
    """Return the tags for which a request with UNDO makes a replica perform an operation."""
    last = last_answer(scheduler)
    if last is None or last.failure is not None or last.operation == operation:
        return ()
    return last.tags
