"""Determine this process's place: a single process, or a rank started by torchrun or Ray."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from settings import SettingsError
from torch.distributed.device_mesh import init_device_mesh


@dataclass(frozen=True)
class Place:
    """A rank, its device and its groups.

    Attributes:
        rank: the rank, from 0.
        ranks: the number of ranks.
        device: the rank's device.
        engine_mesh: the mesh of the engines, with the dimensions "dp" and "tp"; None for a single
            process.
        shard_mesh: the mesh of all ranks, over which FSDP2 shards the model; None for a single
            process.
    """

    rank: int
    ranks: int
    device: torch.device
    engine_mesh: Any = None
    shard_mesh: Any = None


def take_place(tp: int) -> Place:
    """Return this process's place according to torchrun's environment variables.

    If there are several ranks, the process also joins a process group.

    Args:
        tp: the number of ranks that share an engine; 0 means all ranks.

    Raises:
        SettingsError: the number of ranks is not a multiple of `tp`.
    """
    on_gpu = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    tp = tp or ranks
    if ranks % tp:
        raise SettingsError(f"{ranks} ranks cannot be divided into engines of {tp}")
    if ranks == 1:
        return Place(0, 1, device)
    dist.init_process_group(
        "cuda:nccl,cpu:gloo" if on_gpu else "gloo", device_id=device if on_gpu else None
    )
    engines = init_device_mesh(device.type, (ranks // tp, tp), mesh_dim_names=("dp", "tp"))
    everyone = init_device_mesh(device.type, (ranks,))
    return Place(dist.get_rank(), ranks, device, engines, everyone)


def leave_place() -> None:
    """Destroy the process group if it exists."""
    if dist.is_initialized():
        dist.destroy_process_group()
