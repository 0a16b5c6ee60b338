"""Checks of the arguments of a `ColocatedSession`, and the layout of the session's ranks."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from memsaver.errors import ConfigError

from .arguments import check_equal
from .ranks import ALONE, Layout

__all__ = ["check_agreed", "check_options", "group_of", "layout_beside", "options_of"]


def check_options(
    state: object,
    model: object,
    engine: object,
    on_stage: object,
    update_options: object,
    sleep: bool,
) -> None:
    """Raise `ConfigError` if an argument is invalid."""
    if state is None and not callable(getattr(model, "state_dict", None)):
        raise ConfigError(
            f"the weights to send are unknown: a {type(model).__name__} has no state_dict(); pass "
            "state=, a function that returns them"
        )
    for name, given in (("state", state), ("on_stage", on_stage)):
        if given is not None and not callable(given):
            raise ConfigError(f"{name} must be a function, not a {type(given).__name__}")
    if not (
        update_options is None or isinstance(update_options, Mapping) or callable(update_options)
    ):
        raise ConfigError(
            "update_options must be a mapping, or a function that returns one, not a "
            f"{type(update_options).__name__}"
        )
    for name in ("update_weights", *(("sleep", "wake_up") if sleep else ())):
        if not callable(getattr(engine, name, None)):
            raise ConfigError(
                "engine must be a RolloutEngine or have its methods: a "
                f"{type(engine).__name__} has no {name}()"
            )


def check_agreed(group: Any, everyones: Sequence[Mapping[str, str]]) -> None:
    """Raise the same `ConfigError` on all ranks of a group if they pass different arguments."""
    dist: Any = sys.modules.get("torch.distributed")
    check_equal([0] if group is None else dist.get_process_group_ranks(group), everyones)


def options_of(update_options: Any) -> dict[str, Any]:
    """Return the options of one update; raise `ConfigError` if the options are not a mapping."""
    given = update_options() if callable(update_options) else update_options
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ConfigError(
            "update_options must be a mapping of names to values, or a function that returns one, "
            f"not {given!r}"
        )
    return dict(given)


def group_of(group: Any) -> Any:
    """Return the group; None selects the world group if torch.distributed is initialized."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return group
    return dist.group.WORLD if group is None else group


def layout_beside(everyone: Any) -> Layout:
    """Return this rank's place in a group in which every rank counts as an engine."""
    if everyone is None:
        return ALONE
    dist: Any = sys.modules["torch.distributed"]
    rank, place, size = dist.get_rank(), dist.get_rank(everyone), dist.get_world_size(everyone)
    return Layout(rank, tp_ranks=(rank,), dp_groups=(everyone,), dp_rank=place, dp_size=size)
