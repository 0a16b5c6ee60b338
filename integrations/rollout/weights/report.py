"""What an update of an engine's weights did."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WeightUpdate"]


@dataclass(frozen=True)
class WeightUpdate:
    """What `update` did. The same on all ranks but for `seconds`.

    Attributes:
        version: what the engine calls its weights now; None where that was not said.
        seconds: how long it took on this rank.
        bytes: bytes that were sent to each rank of the engine.
        tensors: how many tensors they were.
        tied: tensors that were not sent, as they are the same memory as another one.
        buckets: in how many buckets.
        bucket_bytes: bytes of the largest of them: what the update took beside the model.
        verify: what was asked for: "off", "sampled" or "full".
        received: of how many tensors it was seen, by their digests, that they came as sent.
        held: of how many that the engine's model holds what was sent, in its own layout and type.
        unverified: why that was seen of none, or of fewer than asked for; "" where it was.
        checksums: of an engine without memsaver's plugin: what each of its ranks says of all that
            it holds, which is the same for engines that hold the same; else ().
    """

    version: str | None
    seconds: float
    bytes: int
    tensors: int
    tied: tuple[str, ...]
    buckets: int
    bucket_bytes: int
    verify: str
    received: int
    held: int
    unverified: str = ""
    checksums: tuple[str, ...] = ()
