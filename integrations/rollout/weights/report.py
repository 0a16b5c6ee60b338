"""The report of a weight update."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WeightUpdate"]


@dataclass(frozen=True)
class WeightUpdate:
    """The report of an `update`, which is the same on all ranks except for `seconds`.

    Attributes:
        version: the new version of the engine's weights; None if the update did not set one.
        seconds: the duration on this rank.
        bytes: the number of bytes that were sent to each rank of the engine.
        tensors: the number of tensors that were sent.
        tied: the tensors that were not sent because they share the memory of another tensor.
        mapped: the number of tensors that were sent without a copy, because the engine read them
            directly from the trainer's shareable regions.
        buckets: the number of buckets in which the other tensors were sent.
        bucket_bytes: the size of the largest bucket in bytes, which is the memory that the update
            needs in addition to the model; 0 if there are no buckets.
        verify: the requested verification: "off", "sampled" or "full".
        received: the number of tensors that arrived intact, as their digests show.
        held: the number of tensors whose contents match the engine's model, in the model's own
            layout and type.
        unverified: the reason why fewer tensors were verified than requested; "" if all requested
            tensors were verified.
        checksums: for an engine without memsaver's plugin, the checksum of each rank's weights;
            engines with equal weights have equal checksums. () for an engine with the plugin.
    """

    version: str | None
    seconds: float
    bytes: int
    tensors: int
    tied: tuple[str, ...]
    mapped: int
    buckets: int
    bucket_bytes: int
    verify: str
    received: int
    held: int
    unverified: str = ""
    checksums: tuple[str, ...] = ()
