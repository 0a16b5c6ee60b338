"""Work that only some ranks have, and whose failure all of them must learn of."""

from __future__ import annotations

from collections.abc import Callable

from memsaver.distributed.attempts import Ranks
from memsaver.distributed.channel import Channel

__all__ = ["has_other_ranks", "on_every_rank"]


def has_other_ranks() -> bool:
    """Whether there is a `torch.distributed` world of several ranks."""
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def on_every_rank(what: str, work: Callable[[], object], after: str) -> None:
    """Do this rank's part, and learn how it went on the others. A collective over the world.

    An interrupt on one rank is a `RankError` on the others, and is raised again on its own rank.

    Args:
        what: the call in words.
        work: this rank's part. Ranks without one do nothing in it.
        after: the state after a failure, in words, for the error.

    Raises:
        RankError: it failed on a rank; the same on all, and `__cause__` is a rank's own.
        GroupError: a rank is gone.
        MemsaverError: the exception of the work, if there are no other ranks.
    """
    if not has_other_ranks():
        work()
        return
    Ranks(Channel()).attempt(what, work).values(lambda outcomes: outcomes.error(after))
