"""The GPUs and the ports of an engine that shares the GPUs of a tensor-parallel group."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memsaver.errors import ConfigError

__all__ = [
    "VISIBLE",
    "Gpu",
    "Placement",
    "Sizes",
    "by_host",
    "free_port",
    "gpu_of_this_process",
]

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Gpu:
    """The GPU that a rank uses.

    Attributes:
        host: the name of the GPU's host.
        visible: the rank's CUDA_VISIBLE_DEVICES; None if it is not set.
        index: the GPU's index among the visible GPUs.
    """

    host: str
    visible: str | None
    index: int

    @property
    def name(self) -> str:
        """The GPU's name in CUDA_VISIBLE_DEVICES."""
        if self.visible is None:
            return str(self.index)
        names = [name.strip() for name in self.visible.split(",")]
        return names[self.index] if self.index < len(names) else str(self.index)


@dataclass(frozen=True)
class Placement:
    """The GPUs and the ports of an engine.

    Attributes:
        arguments: the engine's arguments for this placement.
        visible: the value of CUDA_VISIBLE_DEVICES for the engine's processes; None leaves the
            variable unchanged.
        nodes: the placements of the engine's parts on the other hosts, in the hosts' order.
    """

    arguments: Mapping[str, Any]
    visible: str | None = None
    nodes: tuple[Placement, ...] = ()


@dataclass(frozen=True)
class Sizes:
    """The parallel sizes of an engine.

    Attributes:
        width: the number of ranks in a tensor-parallel group.
        stages: the number of pipeline stages in a replica.
        replicas: the number of data-parallel replicas that have their own ranks.
    """

    width: int
    stages: int = 1
    replicas: int = 1

    @property
    def ranks(self) -> int:
        """The total number of ranks."""
        return self.width * self.stages * self.replicas


def gpu_of_this_process() -> Gpu | None:
    """Return torch's current GPU, or None if there is no GPU. Initializes CUDA in this process.

    CUDA must be initialized before an engine starts; otherwise, the environment set for the
    engine's processes would also apply to this process.
    """
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    return Gpu(socket.gethostname(), os.environ.get(VISIBLE), int(torch.cuda.current_device()))


def by_host(gpus: Sequence[Gpu | None]) -> list[list[Gpu]]:
    """Return the GPUs of an engine's ranks, grouped by host; [] if the ranks have none.

    Args:
        gpus: the GPUs of the group's ranks, in the engine's order.

    Raises:
        ConfigError: two ranks use the same GPU, only some ranks have a GPU, a host's ranks are not
            adjacent, or a host has fewer ranks than another host.
    """
    known = [gpu for gpu in gpus if gpu is not None]
    if known and len(known) != len(gpus):
        raise ConfigError("only some ranks of the tensor-parallel group have a GPU")
    groups = [list(group) for _, group in itertools.groupby(known, lambda gpu: gpu.host)]
    hosts = [group[0].host for group in groups]
    if len(set(hosts)) < len(hosts) or len({len(group) for group in groups}) > 1:
        raise ConfigError(
            "the ranks of an engine on several hosts must be adjacent, with the same number on "
            f"each host; they are on {', '.join(gpu.host for gpu in known)}"
        )
    for group in groups:
        names = [gpu.name for gpu in group]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"the ranks of the tensor-parallel group use the GPUs {', '.join(names)}: each "
                "rank needs its own GPU (call torch.cuda.set_device(local_rank) first)"
            )
    return groups


def free_port() -> int:
    """Return a free port on this host, chosen by the system."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])
