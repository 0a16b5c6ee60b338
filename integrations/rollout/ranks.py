"""Computes this rank's position in its tensor-parallel group from a `DeviceMesh`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from memsaver.errors import ConfigError, NotLoadedError

__all__ = ["ALONE", "Layout", "NotInMeshError", "layout_of"]


class NotInMeshError(ConfigError):
    """This rank is not in the mesh, so no other rank waits for it."""


@dataclass(frozen=True)
class Layout:
    """The place of this rank in its mesh.

    Without a prefix, "rank" means the rank in the world, as opposed to `tp_rank` and `dp_rank`.

    Attributes:
        rank: this process's rank.
        tp_group: the process group of the ranks that share an engine; None for a single process.
        tp_ranks: the ranks of that group, in the engine's order. The first rank is the leader,
            which owns the engine.
        tp_rank: this rank's position in `tp_ranks`.
        dp_groups: for each dimension that is not tensor-parallel, the process group of the ranks
            that differ from this rank only along that dimension. The innermost dimension is last.
        dp_rank: the index of this rank's engine, starting at 0.
        dp_size: the number of engines.
        mesh_groups: the ranks of all groups of the mesh, by dimension. The tensor-parallel
            dimension is first (without groups, if the mesh has no such dimension), followed by the
            dimensions of `dp_groups`. Empty if the groups are unknown, in which case a rank with an
            invalid mesh cannot notify the ranks that wait for it.
    """

    rank: int = 0
    tp_group: Any = None
    tp_ranks: tuple[int, ...] = (0,)
    tp_rank: int = 0
    dp_groups: tuple[Any, ...] = ()
    dp_rank: int = 0
    dp_size: int = 1
    mesh_groups: tuple[tuple[tuple[int, ...], ...], ...] = ()

    @property
    def tp_size(self) -> int:
        """The number of ranks that share an engine."""
        return len(self.tp_ranks)

    @property
    def leader(self) -> int:
        """The rank that owns the engine."""
        return self.tp_ranks[0]

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the leader."""
        return self.tp_rank == 0

    def without_groups(self) -> Layout:
        """Return a copy without the process groups, because these keep torch's store alive."""
        return replace(self, tp_group=None, dp_groups=())


ALONE = Layout()


def layout_of(mesh: Any, *, tp: str = "tp", dp: str | Sequence[str] = "dp") -> Layout:
    """Return the place of this rank in a mesh.

    Args:
        mesh: a `torch.distributed.device_mesh.DeviceMesh` that contains this rank and has named
            dimensions; None means this process alone.
        tp: the name of the dimension whose ranks share an engine. If the mesh has no such
            dimension, every rank has its own engine.
        dp: the name or names of the other dimensions, outermost first, such as ("replicate",
            "shard").

    Raises:
        ConfigError: `mesh` is not a device mesh, has different dimensions, or does not contain this
            rank.
        NotLoadedError: torch is not installed.
    """
    if mesh is None:
        return ALONE
    try:
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh
    except ImportError:
        raise NotLoadedError("a mesh needs torch.distributed, and torch is not installed") from None
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh must be a DeviceMesh or None, not {type(mesh).__name__}")
    names = tuple(mesh.mesh_dim_names or ())
    others = (dp,) if isinstance(dp, str) else tuple(dp)
    unknown = [name for name in names if name != tp and name not in others]
    if not names or unknown:
        raise ConfigError(
            f"the mesh's dimensions are {', '.join(map(repr, names)) or 'unnamed'}: name the "
            f"tensor-parallel one (tp={tp!r}) and all others (dp={dp!r})"
        )
    place = mesh.get_coordinate()
    if place is None:
        raise NotInMeshError("this rank is not in the mesh: only the mesh's ranks make the call")
    coordinate = dict(zip(names, place, strict=True))
    sizes = dict(zip(names, mesh.shape, strict=True))
    # In the caller's order, which may differ from the mesh's.
    outer = [name for name in others if name in sizes]
    dp_rank, dp_size = 0, 1
    for name in outer:
        dp_rank, dp_size = dp_rank * sizes[name] + coordinate[name], dp_size * sizes[name]
    rank = dist.get_rank()
    tp_group = mesh.get_group(tp) if tp in sizes else None
    tp_ranks = tuple(dist.get_process_group_ranks(tp_group)) if tp_group else (rank,)
    return Layout(
        rank=rank,
        tp_group=tp_group,
        tp_ranks=tp_ranks,
        tp_rank=tp_ranks.index(rank),  # not the coordinate: torch sorts a group's ranks
        dp_groups=tuple(mesh.get_group(name) for name in outer),
        dp_rank=dp_rank,
        dp_size=dp_size,
        mesh_groups=tuple(
            _groups_along(mesh.mesh, names.index(name)) if name in names else ()
            for name in (tp, *outer)
        ),
    )


def _groups_along(ranks: Any, dimension: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each group along one dimension of the mesh that `ranks` describes."""
    rows = ranks.movedim(dimension, -1).reshape(-1, ranks.shape[dimension])
    return tuple(map(tuple, rows.tolist()))
