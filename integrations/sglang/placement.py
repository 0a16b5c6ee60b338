"""The placement of an SGLang engine on the GPUs of a tensor-parallel group."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Sequence
from dataclasses import replace

from ..engine.placement import Gpu, Placement, by_host, free_port

__all__ = ["place"]

_FIRST_PORT, _PORTS_EACH, _SLOTS = 30000, 64, 32


def place(gpus: Sequence[Gpu | None], dp_rank: int) -> Placement:
    """Return the placement of an engine.

    Args:
        gpus: the GPUs of the group's ranks, in the engine's order.
        dp_rank: the engine's number.

    Raises:
        ConfigError: two ranks use the same GPU, only some ranks have a GPU, or the ranks of a host
            are not adjacent or are fewer than those of another host.
    """
    hosts = by_host(gpus)
    if not hosts:
        return Placement(_ports(dp_rank))
    first, *others = [_on_one_host(group, dp_rank) for group in hosts]
    if not others:
        return first
    # Ports are free on this host, the first; SGLang derives those of the others from the address.
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


def _on_one_host(known: Sequence[Gpu], dp_rank: int) -> Placement:
    names = [gpu.name for gpu in known]
    first = names[0]
    ports = _ports(int(first) if first.isdigit() else dp_rank)
    steps = {later.index - gpu.index for gpu, later in itertools.pairwise(known)} or {1}
    if len({gpu.visible for gpu in known}) == 1 and len(steps) == 1 and min(steps) > 0:
        # Uses the ranks' numbering, so that a GPU has the same number in the engine.
        where = {"base_gpu_id": known[0].index, "gpu_id_step": steps.pop()}
        return Placement({**ports, **where})
    return Placement({**ports, "base_gpu_id": 0, "gpu_id_step": 1}, ",".join(names))


def _ports(slot: int) -> dict[str, int]:
    """Return free ports for an engine; a mesh's engines on one host have different slots.

    The engine may listen on a port only later. Engines of other meshes, which have the same slots
    and may start at the same time, get another `nccl_port`, because the system chooses it.
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
