"""Rollouts of reinforcement learning: one engine for the ranks of a trainer that shares its GPUs.

Importing this imports neither torch nor an engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memsaver.integrations.rollout.backend import Backend, Request, Sample
    from memsaver.integrations.rollout.engine import RolloutEngine
    from memsaver.integrations.rollout.errors import WeightMismatchError
    from memsaver.integrations.rollout.output import RolloutOutput
    from memsaver.integrations.rollout.session import ColocatedSession, Phase
    from memsaver.integrations.rollout.stages import RankStage, Stage, StageReport
    from memsaver.integrations.rollout.weights import WeightGroup, WeightUpdate

__all__ = [
    "Backend",
    "ColocatedSession",
    "Phase",
    "RankStage",
    "Request",
    "RolloutEngine",
    "RolloutOutput",
    "Sample",
    "Stage",
    "StageReport",
    "WeightGroup",
    "WeightMismatchError",
    "WeightUpdate",
]

# Imported when asked for.
_HOMES = {
    "Backend": "backend",
    "ColocatedSession": "session",
    "Phase": "session",
    "RankStage": "stages",
    "Request": "backend",
    "RolloutEngine": "engine",
    "RolloutOutput": "output",
    "Sample": "backend",
    "Stage": "stages",
    "StageReport": "stages",
    "WeightGroup": "weights",
    "WeightMismatchError": "errors",
    "WeightUpdate": "weights",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value  # found without this from now on
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
