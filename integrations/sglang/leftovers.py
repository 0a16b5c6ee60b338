"""What a scheduler process still holds after a release of all memory: releases and reports it.

Torch's cache goes to the driver in any case, and cuBLAS's workspaces if the engine captures no CUDA
graphs. NCCL's communicators are suspended if MEMSAVER_SGLANG_SUSPEND_NCCL is set, and if no code
uses them while memory is released: data-parallel attention, pipeline stages and disaggregation
communicate even if the engine is idle. They are resumed before the first memory is mapped.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..engine import held, moves
from ..engine.communicators import Suspender, of_torch
from ..engine.messages import RankReport
from ..engine.nccl import Communicator, Nccl
from ..engine.ranks import Figures, Group, first_failure
from ..engine.tags import RELEASE_ORDER
from . import settings

__all__ = ["after_release", "before_resume", "communicators"]

_ATTRIBUTE = "_memsaver_suspender"  # of a scheduler
_PARALLEL = "sglang.srt.distributed.parallel_state"
_logger = logging.getLogger("memsaver.sglang")


def after_release(updater: Any, group: Group, ranks: Sequence[RankReport]) -> list[RankReport]:
    """Release what else can be released, if no tag has memory; return the reports of the ranks.

    They get the bytes that each rank still holds. A failure is logged, and changes nothing else.
    Collective.
    """
    if any(tag not in updater.offload_tags and moves.are_memsavers([tag]) for tag in RELEASE_ORDER):
        return list(ranks)
    suspender = _suspender(updater.scheduler)
    if suspender is not None:
        _log("NCCL's communicators keep their memory", suspender.suspend(group))
    measured = group.attempt(lambda: Figures(held=_release(updater.scheduler)))
    _log("the memory that is still in use is unknown", measured)
    return [replace(rank, held=now.held) for rank, now in zip(ranks, measured, strict=True)]


def before_resume(updater: Any, group: Group) -> list[RankReport]:
    """Resume NCCL's communicators. After a failure, nothing has changed. Collective."""
    suspender = _suspender(updater.scheduler)
    return [] if suspender is None else suspender.resume(group)


def communicators(device: int) -> list[Communicator]:
    """Return the NCCL communicators of this scheduler: torch's, and SGLang's own."""
    found = of_torch(device)
    groups = getattr(sys.modules.get(_PARALLEL), "_groups", {})
    for name, reference in list(groups.items()):
        owner = reference()
        own: Any = getattr(owner, "pynccl_comm", None)
        handle = getattr(getattr(own, "comm", None), "value", None)
        if handle:
            library = Nccl(own.nccl.lib)
            ranks = tuple(owner.ranks)
            found.append(Communicator(f"sglang {name}", ranks, own.rank, handle, library))
    return found


def _suspender(scheduler: Any) -> Suspender | None:
    """Return the scheduler's suspender; None if its communicators must stay as they are."""
    found = vars(scheduler).get(_ATTRIBUTE, False)
    if found is False:
        allowed = settings.suspends_nccl() and _is_silent_when_idle(scheduler)
        device = _device(scheduler)
        found = Suspender(lambda: communicators(device), device) if allowed else None
        setattr(scheduler, _ATTRIBUTE, found)
    return found  # type: ignore[no-any-return]


def _is_silent_when_idle(scheduler: Any) -> bool:
    """Return whether an idle engine does not use its communicators; False if that is unknown."""
    arguments = getattr(scheduler, "server_args", None)
    if arguments is None:
        return False
    stages = int(getattr(arguments, "pp_size", 1) or 1)
    disaggregation = getattr(arguments, "disaggregation_mode", None) or "null"
    return (
        not getattr(arguments, "enable_dp_attention", False)
        and stages == 1
        and disaggregation == "null"
    )


def _device(scheduler: Any) -> int:
    """Return the device of a scheduler's model."""
    for owner in (scheduler, getattr(scheduler, "ps", None)):  # since 0.5.16 in `ps`
        device = getattr(owner, "gpu_id", None)
        if isinstance(device, int):
            return device
    return 0


def _release(scheduler: Any) -> dict[str, int]:
    if getattr(getattr(scheduler, "server_args", None), "disable_cuda_graph", False):
        held.clear_workspaces()
    held.release_cache()
    device = _device(scheduler)
    return held.measure(device, communicators(device))


def _log(what: str, ranks: Sequence[RankReport]) -> None:
    failed = first_failure(list(ranks))
    if failed is not None and failed.failure is not None:
        _logger.warning("%s: rank %d: %s", what, failed.rank, failed.failure.message)
