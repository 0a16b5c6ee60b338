"""The rank of a scheduler process among all ranks of its engine.

SGLang numbers ranks only within a tensor-parallel group. A process uses its rank to choose a
payload and to join a group for weights, so processes of different pipeline stages or data-parallel
replicas would choose the same payload and the same rank. This module numbers an engine's ranks by
replica, then by stage, and then by rank in the tensor-parallel group.
"""

from __future__ import annotations

import copy
import importlib
import sys
from dataclasses import dataclass
from typing import Any

from ..engine.ranks import Group
from .updaters import scheduler_of

__all__ = [
    "LOCAL_CONTROL",
    "Place",
    "effective_arguments",
    "group_of",
    "has_local_control",
    "has_parallel_attention",
    "has_replicas",
    "holds_model",
    "parallel_of",
    "place_of",
    "ranks_in",
    "replicas_in",
    "stage_group_of",
    "uses_saver",
]

LOCAL_CONTROL = "enable_dp_attention_local_control_broadcast"  # SGLang's option


@dataclass(frozen=True)
class Place:
    """The position of this process among its engine's ranks.

    Attributes:
        rank: the process's rank among all ranks of the engine.
        first: the engine-wide rank of the first process in the tensor-parallel group.
        width: the number of ranks in the tensor-parallel group.
        size: the number of ranks in the engine.
        stages: the number of pipeline stages.
    """

    rank: int
    first: int
    width: int
    size: int
    stages: int

    def own(self, request: Any) -> Any:
        """Return a request with only the payloads of this process's tensor-parallel group.

        A request with payloads for a single tensor-parallel group is returned unchanged.
        """
        payloads = getattr(request, "serialized_named_tensors", None)
        if payloads is None or self.size == self.width or len(payloads) != self.size:
            return request
        own = copy.copy(request)
        own.serialized_named_tensors = list(payloads[self.first : self.first + self.width])
        return own

    def joining(self, request: Any) -> Any:
        """Return a request to join a group for weights with this process's own rank."""
        if not self.first:
            return request
        own = copy.copy(request)
        own.rank_offset = request.rank_offset + self.first
        return own


def place_of(updater: Any) -> Place:
    """Return this process's place, which its weight updater determines."""
    scheduler = scheduler_of(updater)
    own = Group(updater.tp_cpu_group)
    width, rank = own.size, own.rank
    arguments = effective_arguments(scheduler)
    stages, replicas = ranks_in(arguments, "pp_size"), replicas_in(arguments)
    parallel = parallel_of(scheduler)
    stage = int(getattr(parallel, "pp_rank", 0) or 0) if stages > 1 else 0
    replica = int(getattr(parallel, "dp_rank", 0) or 0) if replicas > 1 else 0
    first = (replica * stages + stage) * width
    return Place(first + rank, first, width, replicas * stages * width, stages)


def group_of(updater: Any) -> Group:
    """Return the ranks of all stages that handle each control request in the same round.

    If `has_local_control` is true, returns only the ranks of this stage.
    """
    scheduler = scheduler_of(updater)
    is_one_stage = ranks_in(effective_arguments(scheduler), "pp_size") == 1
    if is_one_stage or has_local_control(scheduler):
        return stage_group_of(updater)
    return Group(scheduler.world_group.cpu_group)


def stage_group_of(updater: Any) -> Group:
    """Return the ranks of this stage that handle each control request in the same round."""
    scheduler = scheduler_of(updater)
    is_local = has_local_control(scheduler)
    return Group(scheduler.attn_tp_cpu_group if is_local else updater.tp_cpu_group)


def holds_model(updater: Any, has_all_stages: bool) -> bool:
    """Return whether the ranks of a group together contain the whole model.

    The group is the result of `group_of` if `has_all_stages`, otherwise of `stage_group_of`.
    """
    scheduler = scheduler_of(updater)
    if has_local_control(scheduler):  # the experts may be spread over all replicas
        return False
    return has_all_stages or ranks_in(effective_arguments(scheduler), "pp_size") == 1


def uses_saver(updater: Any) -> bool:
    """Return whether SGLang's option `enable_memory_saver` is on, or does not exist."""
    arguments = effective_arguments(scheduler_of(updater))
    return bool(getattr(arguments, "enable_memory_saver", True))


def has_local_control(scheduler: Any) -> bool:
    """Return whether replicas can receive a control request in different event loop iterations.

    With data-parallel attention, the replicas share the ranks of one tensor-parallel group. By
    default, the first replica sends control requests to all of them. If `LOCAL_CONTROL` is set,
    each replica receives its own copy. A collective of the whole group in the handler could then
    deadlock with replicas that wait for this replica in another collective.
    """
    return has_parallel_attention(scheduler) and _is_set(scheduler, LOCAL_CONTROL)


def has_parallel_attention(scheduler: Any) -> bool:
    """Return whether replicas share the ranks of one tensor-parallel group."""
    # SGLang 0.5.22 replaced the first option with the second.
    return _is_set(scheduler, "enable_dp_attention") or _is_set(scheduler, "attn_dp_enabled")


def effective_arguments(owner: Any) -> Any:
    """Return the arguments with the values that SGLang uses; None if they are missing.

    Since SGLang 0.5.19, `server_args` keeps the values that the user passed, and SGLang stores the
    values that it chooses separately.

    Args:
        owner: a scheduler or a tokenizer manager.
    """
    arguments = getattr(owner, "server_args", None)
    try:
        overrides = importlib.import_module("sglang.srt.arg_groups.overrides")
    except ImportError:  # SGLang 0.5.14 and older
        return arguments
    view = getattr(overrides, "resolved_view", None)
    return arguments if view is None or arguments is None else view(arguments)


def _is_set(scheduler: Any, option: str) -> bool:
    owners = (effective_arguments(scheduler), parallel_of(scheduler))
    return any(getattr(owner, option, False) for owner in owners)


def ranks_in(arguments: Any, name: str) -> int:
    """Return a rank count from SGLang's arguments; 1 if the argument is not set."""
    return int(getattr(arguments, name, 1) or 1)


def replicas_in(arguments: Any) -> int:
    """Return the number of replicas that have their own ranks.

    With data-parallel attention, the replicas use the ranks of the tensor-parallel group.
    """
    return 1 if getattr(arguments, "enable_dp_attention", False) else ranks_in(arguments, "dp_size")


def has_replicas(manager: Any) -> bool:
    """Return whether a tokenizer manager's engine has several replicas with their own ranks."""
    return replicas_in(effective_arguments(manager)) > 1


def parallel_of(scheduler: Any) -> Any:
    """Return the object with a scheduler's `pp_rank` and `dp_rank`."""
    if hasattr(scheduler, "ps"):  # in 0.5.16, `get_parallel()` lacks `dp_rank`
        return scheduler.ps
    module = sys.modules.get(type(scheduler).__module__)
    parallel = getattr(module, "get_parallel", None)  # 0.5.23
    return scheduler if parallel is None else parallel()
