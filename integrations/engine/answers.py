"""Creates a scheduler's answers to releases and resumes, and stores the last answer."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from .messages import Answer, Failure, RankReport
from .ranks import first_failure

__all__ = ["failure_of", "last_answer", "name_of", "next_answer"]

# Attributes of the answering object: a scheduler or a worker.
_LAST = "_memsaver_last_answer"
_NAME = "_memsaver_name"


def name_of(owner: Any) -> str:
    """Return a scheduler's name, which is unique even if containers share host names and pids."""
    if not hasattr(owner, _NAME):
        name = f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(8)}"
        setattr(owner, _NAME, name)
    return str(getattr(owner, _NAME))


def last_answer(owner: Any) -> Answer | None:
    """Return the last answer of a scheduler, or None."""
    return getattr(owner, _LAST, None)


def next_answer(
    owner: Any,
    operation: str,
    tags: Sequence[str],
    released: Collection[str],
    ranks: Sequence[RankReport],
    failure: Failure | None,
    *,
    held: Collection[str] = (),
    lost: Collection[str] = (),
) -> Answer:
    """Create and record a scheduler's next answer; see `Answer` for the arguments."""
    before = last_answer(owner)
    answer = Answer(
        name_of(owner),
        operation,
        tuple(tags),
        tuple(sorted(released)),
        tuple(sorted(held)),
        tuple(ranks),
        failure,
        before.number + 1 if before is not None else 1,
        tuple(sorted(lost)),
    )
    setattr(owner, _LAST, answer)
    return answer


def failure_of(ranks: Sequence[RankReport], what: str, then: str) -> Failure | None:
    """Return the first failure, with the rank and its host in the message; None if no rank failed.

    Args:
        ranks: the reports of all ranks.
        what: the operation, such as "release of weights".
        then: a description of the memory's state after the failure.
    """
    rank = first_failure(ranks)
    if rank is None or rank.failure is None:
        return None
    message = (
        f"{what} failed on rank {rank.rank} of {len(ranks)} ({rank.host}): "
        f"{rank.failure.message}; {then}"
    )
    return replace(rank.failure, message=message)
