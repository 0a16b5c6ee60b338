"""The stages of a colocated session's step, in order, and the reports of the stages."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = ["RankStage", "Stage", "StageReport"]


class Stage(str, Enum):
    """A stage of a session's step. The values are the names in lower case."""

    # Entering a rollout:
    SETTLE = "settle"  # wait for the trainer's work on all ranks; empty torch's cache
    # All of the trainer's memory except the model's. With overlap, the pause begins at the end of
    # RESUME_MODEL, and this stage comes after UPDATE and waits for the end of the pause.
    PAUSE_OPTIMIZER = "pause_optimizer"
    RESUME_MODEL = "resume_model"  # if it is paused, for example between two successive rollouts
    WAKE_WEIGHTS = "wake_weights"  # the engine's
    UPDATE = "update"  # send the weights of the trainer's model; empty torch's cache
    PAUSE_MODEL = "pause_model"  # the trainer's copy
    WAKE_REST = "wake_rest"  # the engine's KV cache and graphs
    # The block, and leaving it:
    GENERATE = "generate"
    SLEEP = "sleep"  # put the whole engine to sleep
    # Training:
    # All of the trainer's tags. With overlap, the resume of the optimizer's tag, and of the model's
    # with `offload(by_layer=True)`, only begins here.
    RESUME_TRAINER = "resume_trainer"
    TRAIN = "train"  # the block, and the end of the background resume


@dataclass(frozen=True)
class RankStage:
    """The report of a stage on one rank.

    Attributes:
        rank: the rank in the world group.
        seconds: the duration of the rank's own part, excluding the wait for other ranks.
        peak_bytes: the peak memory use of all processes on the rank's device during the stage,
            sampled every few milliseconds; 0 if there is no driver.
        total_bytes: the total memory of the device.
        tag_bytes: the device memory of memsaver's tags in this process at the end of the stage.
    """

    rank: int
    seconds: float
    peak_bytes: int
    total_bytes: int
    tag_bytes: int


@dataclass(frozen=True)
class StageReport:
    """The report of a stage.

    Attributes:
        stage: the stage.
        began: the start of the stage, in seconds of the monotonic clock (`time.monotonic`).
            Subtract a timeline's `Trace.clock` to get the stage's place in that timeline.
        seconds: the stage's duration on this rank, including the wait for the other ranks.
        ranks: the reports of the ranks, in the group's order; () if the stage failed.
        result: the report of the pause, resume, sleep, wake-up or weight update on this rank. For
            `TRAIN`, the report of the resume that ran in the background during the stage, if any.
            None for other stages.
        error: the class and the message of the stage's exception on this rank, or "".
    """

    stage: Stage
    began: float
    seconds: float
    ranks: tuple[RankStage, ...]
    result: Any = None
    error: str = ""

    @property
    def peak_bytes(self) -> int:
        """The maximum of all ranks' memory peaks, in bytes."""
        return max((rank.peak_bytes for rank in self.ranks), default=0)

    @property
    def slowest(self) -> RankStage | None:
        """The slowest rank, which the other ranks waited for; None if the stage failed."""
        return max(self.ranks, key=lambda rank: rank.seconds, default=None)
