"""The placement of an SGLang engine on the GPUs of a tensor-parallel group."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from memsaver.errors import ConfigError

from ..engine.fields import is_whole
from ..engine.placement import Gpu, Placement, Sizes, by_host, free_port

__all__ = ["place", "sizes_of"]

_FIRST_PORT, _PORTS_EACH, _SLOTS = 30000, 64, 32


def sizes_of(arguments: Mapping[str, Any], ranks: int | None) -> Sizes:
    """Return the parallel sizes that an engine's arguments set.

    Args:
        arguments: arguments of `sglang.Engine`.
        ranks: the number of the trainer's ranks, which the engine cannot exceed; None for no limit.
            Without `tp_size`, the engine uses as many of the trainer's ranks as possible.

    Raises:
        ConfigError: a size is not a positive integer, or the engine needs more than `ranks` ranks.
    """
    outer = {name: arguments.get(name, 1) for name in ("pp_size", "dp_size")}
    if arguments.get("enable_dp_attention"):
        outer["dp_size"] = 1  # its replicas use the ranks of the tensor-parallel group
    numbers = {**outer, "tp_size": arguments.get("tp_size", 1)}
    invalid = [name for name, one in numbers.items() if not is_whole(one) or one < 1]
    stages, replicas = (1, 1) if invalid else outer.values()
    width = arguments.get("tp_size", max(1, (ranks or 1) // (stages * replicas)))
    made = Sizes(width, stages, replicas)
    if invalid or (ranks is not None and made.ranks > ranks):
        names = [name for name in ("tp_size", *outer) if name in arguments]
        texts = ", ".join(f"{name}={arguments[name]!r}" for name in names)
        rest = f", but the mesh's tensor-parallel groups have {ranks} ranks" if ranks else ""
        raise ConfigError(f"invalid numbers of ranks: {texts}{rest}")
    return made


def place(gpus: Sequence[Gpu | None], dp_rank: int, sizes: Sizes | None = None) -> Placement:
    """Return the placement of an engine.

    Args:
        gpus: the GPUs of the group's ranks, in the engine's order.
        dp_rank: the engine's data-parallel rank.
        sizes: the engine's parallel sizes; None for a single tensor-parallel group.

    Raises:
        ConfigError: two ranks use the same GPU, only some ranks have a GPU, a host's ranks are not
            adjacent, or a host has fewer ranks than another host.
    """
    adjacent = sizes is not None and sizes.stages > 1
    placement = _placed(gpus, dp_rank, adjacent)
    if sizes is None or sizes.replicas == 1:
        return placement
    # SGLang chooses a port for each replica, because all replicas would bind a given port.
    others = {name: one for name, one in placement.arguments.items() if name != "nccl_port"}
    return replace(placement, arguments=others)


def _placed(gpus: Sequence[Gpu | None], dp_rank: int, adjacent: bool) -> Placement:
    """See `place`.

    With `adjacent`, the engine's GPU numbers must be consecutive, because SGLang ignores
    `gpu_id_step` between the stages of a pipeline.
    """
    hosts = by_host(gpus)
    if not hosts:
        return Placement(_ports(dp_rank))
    first, *others = [_on_one_host(group, dp_rank, adjacent) for group in hosts]
    if not others:
        return first
    # The ports are free on this host, the first one; SGLang derives the other hosts' ports from the
    # address.
    shared = {"nnodes": len(hosts), "dist_init_addr": f"{hosts[0][0].host}:{free_port()}"}
    nodes = tuple(
        replace(
            node,
            arguments={
                **{name: n for name, n in node.arguments.items() if not name.endswith("port")},
                **shared,
                "node_rank": number,
            },
        )
        for number, node in enumerate(others, 1)
    )
    arguments = {**first.arguments, **shared, "node_rank": 0}
    del arguments["nccl_port"]
    return replace(first, arguments=arguments, nodes=nodes)


def _on_one_host(known: Sequence[Gpu], dp_rank: int, adjacent: bool) -> Placement:
    names = [gpu.name for gpu in known]
    first = names[0]
    ports = _ports(int(first) if first.isdigit() else dp_rank)
    steps = {later.index - gpu.index for gpu, later in itertools.pairwise(known)} or {1}
    can_step = len(steps) == 1 and (steps == {1} if adjacent else min(steps) > 0)
    if can_step and len({gpu.visible for gpu in known}) == 1:
        # Uses the ranks' numbering, so that a GPU has the same number in the engine.
        where = {"base_gpu_id": known[0].index, "gpu_id_step": steps.pop()}
        return Placement({**ports, **where})
    return Placement({**ports, "base_gpu_id": 0, "gpu_id_step": 1}, ",".join(names))


def _ports(slot: int) -> dict[str, int]:
    """Return free ports for an engine; the engines of a mesh on one host have different slots.

    An engine might start to listen on its port only later. Engines of other meshes have the same
    slots and may start at the same time, but receive a different `nccl_port`, because the system
    chooses this port.
    """
    first = _FIRST_PORT + _PORTS_EACH * (slot % _SLOTS)
    free = [port for port in range(first, first + _PORTS_EACH) if _is_free(port)]
    return {"nccl_port": free_port()} | ({"port": free[0]} if free else {})


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("", port))
        except OSError:
            return False
    return True
