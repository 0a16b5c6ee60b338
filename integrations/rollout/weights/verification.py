"""The verification of an update: the requests to an engine's ranks, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from memsaver.errors import ConfigError

from ...engine.weights.checks import RankCheck, VerificationRequest, unknown_to_all
from ...engine.weights.digests import digest
from ..errors import WeightMismatchError
from .buckets import Bucket

__all__ = [
    "Tally",
    "Verify",
    "check_policy",
    "digests_of",
    "raise_unlike",
    "verification_for",
    "verified_places",
]

Verify = Literal["off", "sampled", "full"]

_POLICIES = ("off", "sampled", "full")
_STEP = 8  # a sample contains one in 8 tensors
_SHOWN = 8  # names in a message; the error's `tensors` contains all


def check_policy(verify: str) -> None:
    """Raise `ConfigError` if the policy is unknown."""
    if verify not in _POLICIES:
        raise ConfigError(f"verify must be one of {', '.join(_POLICIES)}, not {verify!r}")


def verified_places(bucket: Bucket, verify: str, number: int) -> tuple[int, ...]:
    """Return the indices of the bucket's tensors to verify; these are the same on all ranks.

    Args:
        bucket: the bucket.
        verify: "off": none; "full": all; "sampled": one in eight, and at least one in each bucket.
        number: the update's sequence number, which selects different tensors for each update.
    """
    if verify == "off":
        return ()
    count = len(bucket.slots)
    step = min(_STEP, count)
    return tuple(range(count)) if verify == "full" else tuple(range(number % step, count, step))


def digests_of(views: Sequence[tuple[str, int, Any]], places: Sequence[int]) -> tuple[str, ...]:
    """Return the digests of selected tensors of a bucket. Waits for the device."""
    return tuple(digest(views[at][2]) for at in places)


def verification_for(
    bucket: Bucket, places: Sequence[int], digests: Sequence[tuple[str, ...]]
) -> VerificationRequest:
    """Return the verification request for a bucket.

    Args:
        bucket: the bucket.
        places: the indices of the tensors to compare.
        digests: each rank's digests of these tensors.
    """
    same = all(row == digests[0] for row in digests)
    rows = tuple(digests[:1] if same else digests)
    return VerificationRequest(bucket.names, tuple(places), rows)


def raise_unlike(
    bucket: Bucket,
    places: Sequence[int],
    digests: Sequence[Sequence[str]],
    senders: Sequence[str],
) -> None:
    """Raise the same `WeightMismatchError` on all ranks if the contents of the senders differ.

    Args:
        bucket: the senders' bucket.
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
        f"the senders' weights have different contents: {senders[0]} differs from others",
        [senders[at] for at in unlike],
        "This bucket was not sent, but earlier ones of the update may have been: make the senders' "
        "weights equal, then update again before the engine generates",
    )


class Tally:
    """The verification results for all buckets of an update.

    Attributes:
        received: the number of tensors that arrived intact on every rank.
        held: the number of tensors whose contents match those of every rank's model.
        ranks: the number of ranks that checked the last bucket; 0 if memsaver's plugin is missing.
        reasons: the reasons why contents could not be compared, without duplicates.
    """

    def __init__(self) -> None:
        self.received = 0
        self.held = 0
        self.ranks = 0
        self.reasons: tuple[str, ...] = ()

    def add(self, bucket: Bucket, places: Sequence[int], checks: Sequence[RankCheck]) -> None:
        """Add the results of all ranks for a bucket whose tensors at `places` were compared.

        Raises:
            WeightMismatchError: a rank's contents differ from those that were sent, or no rank's
                model loads anything from a tensor.
        """
        self.ranks = len(checks)
        if not checks:
            return
        _raise_differing(
            bucket, checks, "damaged", "they arrived with contents that differ from those sent"
        )
        _raise_differing(bucket, checks, "differing", "the engine's contents differ")
        unknown = unknown_to_all(checks).intersection(bucket.names)
        if unknown:
            raise _mismatch(
                bucket,
                unknown,
                "the engine's model loads nothing from them; it may use other names (`rename`)",
                [],
            )
        self.received += min(check.received for check in checks)
        # A rank that uses no part of a tensor, such as a rank in another pipeline stage, counts as
        # having the tensor's contents.
        compared = {bucket.names[at] for at in places}
        self.held += min(check.held + len(compared.intersection(check.unused)) for check in checks)
        reasons = [check.unverified for check in checks if check.unverified]
        self.reasons = tuple(dict.fromkeys((*self.reasons, *reasons)))


def _raise_differing(bucket: Bucket, checks: Sequence[RankCheck], field: str, what: str) -> None:
    found = [(check, getattr(check, field)) for check in checks if getattr(check, field)]
    if found:
        names = {name for _, some in found for name in some}
        ranks = [check.place for check, _ in found]
        raise _mismatch(bucket, names, what, ranks)


def _mismatch(
    bucket: Bucket,
    names: set[str],
    what: str,
    ranks: Sequence[str],
    advice: str = "The sender's weights are unchanged, and some of the engine's are new: update "
    "the engine again before it generates",
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
