"""The arguments of a `ColocatedSession`: what it can use, and which ranks it is for."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from memsaver.errors import ConfigError
from memsaver.integrations.rollout.ranks import ALONE, Layout

__all__ = ["check_options", "group_of", "layout_beside"]


def check_options(
    state: object,
    model: object,
    engine: object,
    on_stage: object,
    update_options: object,
    sleep: bool,
) -> None:
    """Raise `ConfigError` unless a session can use them."""
    if state is None and not callable(getattr(model, "state_dict", None)):
        raise ConfigError(
            f"which weights are to be sent is unknown: a {type(model).__name__} has no "
            "state_dict(); give state=, which returns them"
        )
    for name, given in (("state", state), ("on_stage", on_stage)):
        if given is not None and not callable(given):
            raise ConfigError(f"{name} is a function, not a {type(given).__name__}")
    if not (
        update_options is None or isinstance(update_options, Mapping) or callable(update_options)
    ):
        raise ConfigError(
            "update_options is a mapping, or a function that returns one, not a "
            f"{type(update_options).__name__}"
        )
    for name in ("update_weights", *(("sleep", "wake_up") if sleep else ())):
        if not callable(getattr(engine, name, None)):
            raise ConfigError(
                f"engine is a RolloutEngine, or has its methods: a {type(engine).__name__} has no "
                f"{name}()"
            )


def group_of(group: Any) -> Any:
    """Return the group, the world for None; None if this process is alone."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return group
    return dist.group.WORLD if group is None else group


def layout_beside(everyone: Any) -> Layout:
    """Return the place of this rank if all ranks of a group stand beside each other."""
    if everyone is None:
        return ALONE
    dist: Any = sys.modules["torch.distributed"]
    rank, size = dist.get_rank(), dist.get_world_size(everyone)
    return Layout(rank=rank, tp_ranks=(rank,), dp_groups=(everyone,), dp_size=size)
