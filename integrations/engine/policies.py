"""`Policy`: how an engine handles requests while its memory is released."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Policy", "WhenAsleep"]

WhenAsleep = Literal["refuse", "wait", "wake"]


@dataclass(frozen=True)
class Policy:
    """The policy for requests that need released memory.

    Attributes:
        when_asleep: "refuse" raises an error, "wait" holds a request until another caller has
            resumed the memory, and "wake" resumes the memory for the request.
        wait_seconds: the longest time that a request is held, or that a wake-up is retried if
            memory is insufficient.
        sleep_after: the idle time in seconds after which the engine itself releases its memory; 0
            disables this release.
        most_held: the maximum number of requests that are held at the same time; a batch counts as
            one request. Further requests raise `EngineAsleepError`.
    """

    when_asleep: WhenAsleep = "refuse"
    wait_seconds: float = 60.0
    sleep_after: float = 0.0
    most_held: int = 65536
