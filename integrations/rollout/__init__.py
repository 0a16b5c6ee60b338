"""Rollouts for reinforcement learning, with inference engines that share a trainer's GPUs.

Importing this package imports neither torch nor an engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import exports

if TYPE_CHECKING:
    from ..engine.interface import Backend, Request, Sample
    from .engine_set import EngineSet
    from .errors import RestartLimitError, WeightMismatchError
    from .output import RolloutOutput
    from .restarts import Restarts
    from .rollout_engine import RolloutEngine
    from .session import ColocatedSession, Phase
    from .stages import RankStage, Stage, StageReport
    from .weights import WeightGroup, WeightUpdate

__all__ = [
    "Backend",
    "ColocatedSession",
    "EngineSet",
    "Phase",
    "RankStage",
    "Request",
    "RestartLimitError",
    "Restarts",
    "RolloutEngine",
    "RolloutOutput",
    "Sample",
    "Stage",
    "StageReport",
    "WeightGroup",
    "WeightMismatchError",
    "WeightUpdate",
]

# Imported at their first use.
__getattr__, __dir__ = exports(
    __name__,
    {
        "Backend": "..engine.interface",
        "ColocatedSession": ".session",
        "EngineSet": ".engine_set",
        "Phase": ".session",
        "RankStage": ".stages",
        "Request": "..engine.interface",
        "RestartLimitError": ".errors",
        "Restarts": ".restarts",
        "RolloutEngine": ".rollout_engine",
        "RolloutOutput": ".output",
        "Sample": "..engine.interface",
        "Stage": ".stages",
        "StageReport": ".stages",
        "WeightGroup": ".weights",
        "WeightMismatchError": ".errors",
        "WeightUpdate": ".weights",
    },
)
