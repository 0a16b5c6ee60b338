"""Whether an engine holds what it was sent: what it is asked to look at, and what it says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from memsaver.errors import ConfigError
from memsaver.integrations.rollout.errors import WeightMismatchError
from memsaver.integrations.rollout.weights.buckets import Bucket
from memsaver.integrations.sglang.digests import digest
from memsaver.integrations.sglang.weight_checks import Order, RankCheck, unknown_to_all

__all__ = ["Tally", "Verify", "check_policy", "digests_of", "looked_at", "order_of", "raise_unlike"]

Verify = Literal["off", "sampled", "full"]

_POLICIES = ("off", "sampled", "full")
_STEP = 8  # of so many tensors, a sample has one
_SHOWN = 8  # names in a message; the error has all


def check_policy(verify: str) -> None:
    """Raise ConfigError where it is none."""
    if verify not in _POLICIES:
        raise ConfigError(f"verify is one of {', '.join(_POLICIES)}, not {verify!r}")


def looked_at(bucket: Bucket, verify: str, number: int) -> tuple[int, ...]:
    """Which tensors of a bucket are verified, by their place in it; the same on all ranks.

    Args:
        bucket: the bucket.
        verify: "off" none, "full" all, "sampled" one of eight, and one of each bucket at least.
        number: counts the updates, each of which samples others.
    """
    if verify == "off":
        return ()
    count = len(bucket.slots)
    step = min(_STEP, count)
    return tuple(range(count)) if verify == "full" else tuple(range(number % step, count, step))


def digests_of(views: Sequence[tuple[str, int, Any]], places: Sequence[int]) -> tuple[str, ...]:
    """The digests of some of a bucket's tensors. Waits for the device."""
    return tuple(digest(views[at][2]) for at in places)


def order_of(bucket: Bucket, places: Sequence[int], digests: Sequence[tuple[str, ...]]) -> Order:
    """What the engine is asked.

    Args:
        bucket: what it gets.
        places: what is to be looked at.
        digests: what was sent of it, by each rank.
    """
    same = all(row == digests[0] for row in digests)
    return Order(bucket.names, tuple(places), tuple(digests[:1] if same else digests))


def raise_unlike(
    bucket: Bucket,
    places: Sequence[int],
    digests: Sequence[Sequence[str]],
    senders: Sequence[str],
) -> None:
    """Raise the same `WeightMismatchError` on all ranks if the senders' contents differ.

    Args:
        bucket: the bucket that they send.
        places: the indices of the bucket's tensors that have digests.
        digests: each sender's digests of these tensors.
        senders: each sender's name, for the message.
    """
    unlike = [at for at, row in enumerate(digests) if tuple(row) != tuple(digests[0])]
    if not unlike:
        return
    names = {
        bucket.names[place]
        for at in unlike
        for place, one, other in zip(places, digests[0], digests[at], strict=True)
        if one != other
    }
    raise _mismatch(
        bucket,
        names,
        f"the senders of weights have different contents: {senders[0]} differs from others",
        [senders[at] for at in unlike],
        "This bucket was not sent, but earlier ones of the update may have been: make the senders' "
        "weights equal, then update again before the engine generates",
    )


class Tally:
    """What the engine said of all buckets of an update.

    Attributes:
        received: tensors that came as they were sent, on every rank that tells.
        held: tensors of which every rank holds what was sent.
        ranks: how many of the engine's ranks told of the last bucket; 0 without memsaver's plugin.
        reasons: why what an engine holds was not compared, each once.
    """

    def __init__(self) -> None:
        self.received = 0
        self.held = 0
        self.ranks = 0
        self.reasons: tuple[str, ...] = ()

    def add(self, bucket: Bucket, checks: Sequence[RankCheck]) -> None:
        """What the engine says of a bucket.

        Raises:
            WeightMismatchError: it does not hold what it was sent, on some rank, or its model has
                no part of a tensor on any.
        """
        self.ranks = len(checks)
        if not checks:
            return
        _raise_differing(bucket, checks, "damaged", "they came otherwise than sent")
        _raise_differing(bucket, checks, "differing", "the engine holds something else")
        unknown = unknown_to_all(checks).intersection(bucket.names)
        if unknown:
            raise _mismatch(
                bucket,
                unknown,
                "the engine's model takes nothing of them, and may call them otherwise (`rename`)",
                [],
            )
        self.received += min(check.received for check in checks)
        self.held += min(check.held for check in checks)
        told = [check.unverified for check in checks if check.unverified]
        self.reasons = tuple(dict.fromkeys((*self.reasons, *told)))


def _raise_differing(bucket: Bucket, checks: Sequence[RankCheck], field: str, what: str) -> None:
    found = [(check, getattr(check, field)) for check in checks if getattr(check, field)]
    if found:
        names = {name for _, some in found for name in some}
        ranks = [f"rank {check.rank} ({check.host})" for check, _ in found]
        raise _mismatch(bucket, names, what, ranks)


def _mismatch(
    bucket: Bucket,
    names: set[str],
    what: str,
    ranks: Sequence[str],
    advice: str = "The sender's weights are as they were, and some of the engine's are new: update "
    "them again before it generates",
) -> WeightMismatchError:
    tensors = tuple(name for name in bucket.names if name in names)
    shown = ", ".join(tensors[:_SHOWN])
    more = f" and {len(tensors) - _SHOWN} more" if len(tensors) > _SHOWN else ""
    where = f", on {', '.join(ranks)}" if ranks else ""
    error = WeightMismatchError(
        f"{len(tensors)} of the {len(bucket.slots)} tensors of a bucket: {what}{where}: {shown}"
        f"{more}. {advice}"
    )
    error.tensors = tensors
    return error
