"""Requests and checks shared by the scenarios for SGLang engines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from gpu_trainer import GIB, MIB
from sglang_engines import SLACK, Session

from memsaver.integrations.engine.reports import SleepReport

EVERY = frozenset({"kv_cache", "weights", "cuda_graph"})
ROOM = 2 * GIB  # for the weights and the graphs, and never for the KV cache


@contextlib.contextmanager
def gives_back(session: Session, reports: list[SleepReport]) -> Iterator[None]:
    """Check that the block releases as many bytes to the driver as the reports in the list
    state.
    """
    before = session.free()
    yield
    gained = [now - then for now, then in zip(session.free(), before, strict=True)]
    told = sum(report.bytes for report in reports)
    ranks = [rank for report in reports for step in report.steps for rank in step.ranks]
    assert told > 0 and len({(rank.host, rank.pid) for rank in ranks}) == session.ranks, ranks
    assert sum(gained) >= 0.98 * told - session.ranks * SLACK, (gained, told)
    if len(session.replicas) == 1:  # with several replicas, each has a rank 0
        for gpu, gain in enumerate(gained):
            of_rank = sum(rank.bytes for rank in ranks if rank.rank % session.gpus == gpu)
            assert of_rank > 0 and gain >= 0.98 * of_rank - SLACK, (gpu, gain, of_rank)


def check_output(session: Session) -> None:
    outputs = session.outputs()
    assert outputs == session.expected, f"{outputs} instead of {session.expected}"


def sleep(session: Session, tags: Any = None) -> SleepReport:
    """Put the engine to sleep after its current generation ends."""
    return session.controller.sleep(tags, wait_idle=True)


def check_refusal(session: Session, error: Any, before: list[int], gpu: int) -> None:
    """Check that the error states its cause, rank and remedy, and that no rank's memory has
    grown.
    """
    for part in ("kv_cache", "out of memory", f"rank {gpu} of {session.ranks}", "free memory"):
        assert part in str(error), str(error)
    assert error.needed > error.free > 0, (error.needed, error.free)
    taken = [then - now for now, then in zip(session.free(), before, strict=True)]
    assert max(taken) < 256 * MIB, f"{taken} bytes are held after: {error}"
