"""The stages of a colocated step, in their order, and what is known of each when it is over."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = ["RankStage", "Stage", "StageReport"]


class Stage(str, Enum):
    """A stage of a step. Its values are their names in lower case."""

    # Entering a rollout:
    SETTLE = "settle"  # all work of the trainer is done on all ranks; torch's cache goes
    PAUSE_OPTIMIZER = "pause_optimizer"  # all of the trainer's memory but the model's
    RESUME_MODEL = "resume_model"  # where it is paused: two rollouts in a row
    WAKE_WEIGHTS = "wake_weights"  # the engine's
    UPDATE = "update"  # from the trainer's model; torch's cache goes
    PAUSE_MODEL = "pause_model"  # the trainer's copy
    WAKE_REST = "wake_rest"  # the engine's KV cache and graphs
    # The block, and leaving it:
    GENERATE = "generate"
    SLEEP = "sleep"  # the engine, all of it
    # Training:
    RESUME_TRAINER = "resume_trainer"  # model, optimizer, and what goes with them
    TRAIN = "train"  # the block


@dataclass(frozen=True)
class RankStage:
    """A stage on one rank.

    Attributes:
        rank: the rank in the world.
        seconds: how long its own part took, without waiting for others.
        peak_bytes: the most memory of its device that was in use meanwhile, by whatever process,
            as the driver says: looked at every few milliseconds. 0 where there is no driver.
        total_bytes: the memory that its device has.
        tag_bytes: device memory that memsaver's tags in this process held at the end.
    """

    rank: int
    seconds: float
    peak_bytes: int
    total_bytes: int
    tag_bytes: int


@dataclass(frozen=True)
class StageReport:
    """A stage that is over.

    Attributes:
        stage: which one.
        seconds: how long it took here, waiting for the other ranks included.
        ranks: each rank's part, in the group's order; () where it failed.
        result: what it gave on this rank: the report of the pause, resume, sleep, wake-up or weight
            update; None for the others.
        error: the class and the text of what it raised on this rank, or "".
    """

    stage: Stage
    seconds: float
    ranks: tuple[RankStage, ...]
    result: Any = None
    error: str = ""

    @property
    def peak_bytes(self) -> int:
        """The highest peak of all ranks."""
        return max((rank.peak_bytes for rank in self.ranks), default=0)

    @property
    def slowest(self) -> RankStage | None:
        """The rank that the others waited for; None where it failed."""
        return max(self.ranks, key=lambda rank: rank.seconds, default=None)
