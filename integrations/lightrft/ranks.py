"""Work that only some ranks have, and whose failure all of them must hear of."""

from __future__ import annotations

from collections.abc import Callable

from memsaver.distributed import RankError
from memsaver.distributed.channel import Channel
from memsaver.distributed.errors import ranks_text
from memsaver.distributed.messages import Account

__all__ = ["has_other_ranks", "on_every_rank"]


def has_other_ranks() -> bool:
    """Whether there is a `torch.distributed` world of several ranks."""
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def on_every_rank(what: str, work: Callable[[], object], after: str) -> None:
    """Do this rank's part, and hear how the others fared. A collective over the world.

    Args:
        what: the call in words.
        work: this rank's part. Ranks that have none do nothing in it.
        after: what holds where it failed, in words, for the error.

    Raises:
        RankError: it failed on a rank; the same on all, and `__cause__` is a rank's own.
        GroupError: a rank is gone.
        MemsaverError: where there are no other ranks, what the work raised.
    """
    if not has_other_ranks():
        work()
        return
    channel = Channel()
    mine: Exception | None = None
    try:
        work()
    except Exception as error:
        mine = error
    told = Account.of(mine, what).packed()
    accounts = [Account.parse(data) for data in channel.all_gather(told, None, what)]
    failures = {
        rank: account.failure(rank)
        for rank, account in zip(channel.ranks, accounts, strict=True)
        if account.kind
    }
    if not failures:
        return
    reasons = "; ".join(f"{ranks_text([f.rank])}: {f.reason}" for f in failures.values())
    failed = RankError(
        f"{what} failed on {ranks_text(failures)} of {len(accounts)}: {reasons}; {after}",
        tag=next((failure.tag for failure in failures.values() if failure.tag), ""),
    )
    failed.failures, failed.stuck = failures, {}
    raise failed from mine
