"""Access to the groups of torch.distributed, and a check that this rank can use a group."""

from __future__ import annotations

from typing import Any

from memsaver.errors import ConfigError, InvalidStateError, MemsaverError, NotLoadedError

__all__ = ["modules", "refusal_of"]


def modules() -> tuple[Any, Any]:
    """Return torch and torch.distributed. Raises `NotLoadedError` if either module is missing."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        raise NotLoadedError(
            "memsaver.distributed needs torch.distributed groups, but torch is not installed"
        ) from None
    if not dist.is_available():
        raise NotLoadedError("this torch was built without torch.distributed")
    return torch, dist


def refusal_of(group: Any) -> MemsaverError | None:
    """Return the error for a group that this rank cannot use, or None for a usable group.

    Args:
        group: the group; None means the world.

    Raises:
        InvalidStateError: torch.distributed is not initialized, or this rank is not in the group.
            In the latter case, no rank of the group waits for this rank.
        NotLoadedError: torch is not installed, or has no torch.distributed.
    """
    _, dist = modules()
    if group is not None and group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidStateError(
            "this rank is not in the group: only the group's ranks may make the call"
        )
    # Compares the type, because an object may override `isinstance` checks and comparisons.
    odd = group is not None and not issubclass(type(group), dist.ProcessGroup)
    refused: MemsaverError | None = None
    if odd:
        refused = ConfigError(
            f"group must be a torch.distributed process group or None, not {type(group).__name__}"
        )
    if not dist.is_initialized():
        raise refused or InvalidStateError(
            "torch.distributed is not initialised, so there are no other ranks: call "
            "torch.distributed.init_process_group first, or memsaver.pause, resume or swap for "
            "this process only"
        )
    if refused is None and group is not None:
        try:
            dist.get_process_group_ranks(group)
            dist.get_rank(group)
        except (KeyError, RuntimeError, ValueError):
            refused = InvalidStateError(
                "the group cannot be used, because torch.distributed does not know it: was it "
                "destroyed?"
            )
    return refused
