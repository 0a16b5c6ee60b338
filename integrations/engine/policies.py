"""`Policy`: the treatment of requests that reach an engine whose memory is released."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Policy", "WhenAsleep"]

WhenAsleep = Literal["refuse", "wait", "wake"]


@dataclass(frozen=True)
class Policy:
    """The treatment of requests that need released memory.

    Attributes:
        when_asleep: "refuse" raises; "wait" holds a request until another caller has resumed the
            memory; "wake" resumes the memory for the request.
        wait_seconds: the longest time that a request is held, or that a wake-up without enough
            memory is repeated.
        sleep_after: seconds without a request after which the engine releases its memory itself; 0
            never does.
    """

    when_asleep: WhenAsleep = "refuse"
    wait_seconds: float = 60.0
    sleep_after: float = 0.0
