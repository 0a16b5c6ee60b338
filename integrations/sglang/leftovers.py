"""Reduces and reports the memory that a scheduler process still uses after a release of all tags.

Torch's cache is always released to the driver; cuBLAS's workspaces are released if the engine
captures no CUDA graphs. NCCL's communicators are suspended if MEMSAVER_SGLANG_SUSPEND_NCCL is set
and no code uses them while memory is released. The guard (guard.py) must therefore be installed to
refuse requests, and no rank may use a setting that makes even an idle engine communicate. The
communicators are resumed with the first tags: at the same time if enough memory is free for both,
otherwise before the tags.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..engine import held, moves
from ..engine.communicators import Suspender, of_groups, of_torch
from ..engine.messages import RankReport
from ..engine.nccl import Communicator
from ..engine.ranks import Figures, Group, first_failure
from ..engine.tags import GRAPH, RELEASE_ORDER
from . import settings
from .guard import guard_of
from .places import effective_arguments, has_parallel_attention
from .updaters import scheduler_of

__all__ = ["after_release", "communicators", "resume"]

_ATTRIBUTE = "_memsaver_suspender"  # an attribute of a scheduler
# Unless these settings have these values, an idle engine communicates, or registers memory with its
# communicators. A query makes the expert recorder add up its counts across ranks.
_SILENT = {
    "disaggregation_mode": "null",
    "elastic_ep_backend": None,
    "enable_symm_mem": False,
    "expert_distribution_recorder_mode": None,
    "pp_size": 1,
}
_PARALLEL = "sglang.srt.distributed.parallel_state"
_logger = logging.getLogger("memsaver.sglang")


def after_release(updater: Any, group: Group, ranks: Sequence[RankReport]) -> list[RankReport]:
    """If no tag has memory, release memory outside tags; return the reports of the ranks.

    Adds to the reports the bytes that each rank still uses. A failure is logged, but the release
    still counts as successful. `Suspender.suspend` describes the state of the communicators after a
    failure. Collective.
    """
    scheduler = scheduler_of(updater)
    # The ranks decide together, because only some of them may have a setting or a tag.
    votes = group.gather(
        {
            "all_released": not any(
                tag not in updater.offload_tags and moves.are_memsavers([tag])
                for tag in RELEASE_ORDER
            ),
            "suspends": settings.suspends_nccl() and _is_silent_asleep(scheduler),
        }
    )
    if not all(vote["all_released"] for vote in votes):
        return list(ranks)
    if all(vote["suspends"] for vote in votes):
        _log(
            "could not suspend all of NCCL's communicators; a resume may fail",
            _suspender(scheduler).suspend(group),
        )
    measured = group.attempt(lambda: Figures(held=_release(scheduler)))
    _log("the memory that is still in use is unknown", measured)
    return [replace(rank, held=now.held) for rank, now in zip(ranks, measured, strict=True)]


def resume(
    updater: Any, group: Group, tags: Sequence[str], work: Callable[[], list[RankReport]]
) -> tuple[list[RankReport], list[RankReport]]:
    """Resume NCCL's communicators, and call `work` to resume the tags; see `Suspender.resume`."""
    # Either all ranks have a suspender, or no rank has one.
    suspender = getattr(scheduler_of(updater), _ATTRIBUTE, None)
    if suspender is None:
        return [], work()
    found: tuple[list[RankReport], list[RankReport]] = suspender.resume(
        group, lambda: moves.paused_bytes(tags), work
    )
    return found


def communicators(device: int) -> list[Communicator]:
    """Return this scheduler's NCCL communicators, which torch or SGLang created."""
    return [*of_torch(device), *of_groups("sglang", _PARALLEL)]


def _suspender(scheduler: Any) -> Suspender:
    """Return the scheduler's `Suspender`, which the first call creates."""
    found: Suspender | None = getattr(scheduler, _ATTRIBUTE, None)
    if found is None:
        device = held.device()
        found = Suspender(lambda: communicators(device), device)
        setattr(scheduler, _ATTRIBUTE, found)
    return found


def _is_silent_asleep(scheduler: Any) -> bool:
    """Return whether a sleeping engine is known not to use its communicators."""
    arguments = effective_arguments(scheduler)
    if arguments is None or guard_of(scheduler) is None:
        return False
    if has_parallel_attention(scheduler):  # its ranks communicate even while they are idle
        return False
    return all(getattr(arguments, name, usual) in (usual, None) for name, usual in _SILENT.items())


def _release(scheduler: Any) -> dict[str, int]:
    device = held.device()
    without_graphs = getattr(effective_arguments(scheduler), "disable_cuda_graph", False)
    if without_graphs and not moves.are_memsavers([GRAPH]):
        held.clear_workspaces(device)
    held.release_cache()
    return held.measure(device, communicators(device))


def _log(what: str, ranks: Sequence[RankReport]) -> None:
    failed = first_failure(list(ranks))
    if failed is not None and failed.failure is not None:
        _logger.warning("%s: rank %d: %s", what, failed.rank, failed.failure.message)
