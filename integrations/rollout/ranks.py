"""Which rank is in which tensor-parallel group, out of a `DeviceMesh`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from memsaver.errors import ConfigError, NotLoadedError

__all__ = ["ALONE", "Layout", "NotInMeshError", "layout_of"]


class NotInMeshError(ConfigError):
    """This rank is not in the mesh, so that no other rank waits for it."""


@dataclass(frozen=True)
class Layout:
    """Where this rank stands. Ranks are those of the world, unless they are called tp or dp ranks.

    Attributes:
        rank: this process's rank.
        tp_group: the process group of the ranks that share an engine; None of a process alone.
        tp_ranks: its ranks, in the engine's order. The first one is the leader, and has the engine.
        tp_rank: this rank's place among them.
        dp_groups: for each dimension that is not tensor-parallel, the process group of the ranks
            with the same tp rank along it, the innermost last.
        dp_rank: which engine this rank belongs to, from 0.
        dp_size: how many engines there are.
    """

    rank: int = 0
    tp_group: Any = None
    tp_ranks: tuple[int, ...] = (0,)
    tp_rank: int = 0
    dp_groups: tuple[Any, ...] = ()
    dp_rank: int = 0
    dp_size: int = 1

    @property
    def tp_size(self) -> int:
        """How many ranks share an engine."""
        return len(self.tp_ranks)

    @property
    def leader(self) -> int:
        """The rank that has the engine."""
        return self.tp_ranks[0]

    @property
    def is_leader(self) -> bool:
        """Whether that is this one."""
        return self.tp_rank == 0

    def without_groups(self) -> Layout:
        """Return a copy without the process groups, which would keep torch's store alive."""
        return replace(self, tp_group=None, dp_groups=())


ALONE = Layout()


def layout_of(mesh: Any, *, tp: str = "tp", dp: str | Sequence[str] = "dp") -> Layout:
    """Where this rank stands in a mesh.

    Args:
        mesh: a `torch.distributed.device_mesh.DeviceMesh` with named dimensions that this rank is
            in; None is this process alone.
        tp: the dimension whose ranks share an engine. Where the mesh has none of that name, every
            rank has an engine of its own.
        dp: the other dimensions, as one name or several ("replicate", "shard"), outermost first.

    Raises:
        ConfigError: it is no mesh, its dimensions are others, or this rank is not in it.
        NotLoadedError: torch is not installed.
    """
    if mesh is None:
        return ALONE
    try:
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh
    except ImportError:
        raise NotLoadedError("a mesh is one of torch.distributed, and torch is not there") from None
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh is a DeviceMesh or None, not {type(mesh).__name__}")
    names = tuple(mesh.mesh_dim_names or ())
    others = (dp,) if isinstance(dp, str) else tuple(dp)
    unknown = [name for name in names if name != tp and name not in others]
    if not names or unknown:
        raise ConfigError(
            f"the mesh's dimensions are {', '.join(map(repr, names)) or 'without names'}: name the "
            f"tensor-parallel one (tp={tp!r}) and all others (dp={dp!r})"
        )
    place = mesh.get_coordinate()
    if place is None:
        raise NotInMeshError("this rank is not in the mesh: only its own ranks call")
    coordinate = dict(zip(names, place, strict=True))
    sizes = dict(zip(names, mesh.shape, strict=True))
    # In the order that the caller names them, which need not be that of the mesh.
    outer = [name for name in others if name in sizes]
    dp_rank, dp_size = 0, 1
    for name in outer:
        dp_rank, dp_size = dp_rank * sizes[name] + coordinate[name], dp_size * sizes[name]
    rank = dist.get_rank()
    tp_group = mesh.get_group(tp) if tp in sizes else None
    return Layout(
        rank=rank,
        tp_group=tp_group,
        tp_ranks=tuple(dist.get_process_group_ranks(tp_group)) if tp_group else (rank,),
        tp_rank=coordinate.get(tp, 0),
        dp_groups=tuple(mesh.get_group(name) for name in outer),
        dp_rank=dp_rank,
        dp_size=dp_size,
    )
