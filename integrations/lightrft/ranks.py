"""Runs work on ranks, and raises a failure of one rank on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from memsaver.distributed.attempts import Ranks
from memsaver.distributed.channel import Channel
from memsaver.distributed.messages import JSON

__all__ = ["has_other_ranks", "on_every_rank"]

Value = TypeVar("Value")


def has_other_ranks() -> bool:
    """Return whether there is a `torch.distributed` world with several ranks."""
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def on_every_rank(what: str, work: Callable[[], Value], after: str) -> list[Value]:
    """Run this rank's part, and return the results of all ranks.

    Every rank of the world must make this collective call.

    An interrupt on one rank raises `RankError` on the other ranks, and is raised again on its own
    rank.

    Args:
        what: a description of the call, for messages.
        work: this rank's part of the work, whose result is sent as JSON; it may do nothing.
        after: a description of the state after a failure, for the error message.

    Raises:
        RankError: the work failed on a rank. The error is the same on all ranks; on a rank that
            failed, `__cause__` is the rank's own exception.
        GroupError: a rank is unreachable.
        MemsaverError: the exception that the work raised, if this is the only rank.
    """
    if not has_other_ranks():
        return [work()]
    outcomes = Ranks(Channel()).attempt(what, work, codec=JSON)
    return outcomes.values(lambda failed: failed.error(after))
