"""Defines all scenarios by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from faults.calls import Allocate, Ask, Captured, FirstUse, Free, PoolAllocate
from faults.killed_exporters import Import, Release
from faults.machine import MIB, Machine
from faults.scenario import GPU_GRANULE, Scenario, require
from faults.sharing import Share
from faults.transitions import (
    DiskCached,
    DiskNamed,
    Graph,
    NeighbourNearlyFull,
    Pause,
    Resume,
    Swap,
    Unrestored,
)

__all__ = ["SCENARIOS", "Scenario"]

Make = Callable[[Machine, str], Scenario]


def _case(
    kind: Callable[..., Scenario], *arguments: Any, granule: int | None = None, **named: Any
) -> Make:
    def make(machine: Machine, name: str) -> Scenario:
        scenario = kind(machine, name, *arguments, **named)
        scenario.granule = granule or scenario.granule
        return scenario

    return make


def _fingerprint(asked: Ask) -> object:
    return asked.memsaver.fingerprint(*asked.tags.names)


def _view(asked: Ask) -> object:
    from memsaver._runtime.native import _C

    block, contents = asked.tags.blocks[1]
    view = _C.backup_view(block.address, block.nbytes)
    require(bytes(view) == contents, "the backup has other contents")
    return view


def _timeline(asked: Ask) -> object:
    """Start, sample and read a recording; always stop it, so that the next recording can start."""
    from memsaver._runtime.native import _C

    _C.timeline_start(1000)
    try:
        _C.timeline_sample()
        rows, dropped = _C.timeline_read()
    finally:
        _C.timeline_stop()
    held = {(row[3], row[2]): row[9] for row in rows if row[3] is not None}
    stats = {(row.tag, row.device): row.resident_bytes for row in asked.memsaver.stats().tags}
    require(dropped == 0 and held == stats, f"{held} are recorded, not {stats}")
    return held


# A larger block then has two pieces with fingerprints of their own, of which one changes.
TWO_PIECES = MIB

SCENARIOS: dict[str, Make] = {
    "allocate_small": _case(Allocate, 100_000),
    "allocate_large": _case(Allocate, 3 * MIB),
    "allocate_huge": _case(Allocate, 2 * 1024 * MIB + 1),
    "allocate_in_new_tags": _case(Allocate, 70 * MIB, new_tags=True),
    "allocate_in_capture": _case(Captured),
    "allocate_for_torch_pool": _case(PoolAllocate, 70 * MIB),
    "free": _case(Free, "mapped"),
    "free_while_paused": _case(Free, "paused"),
    "free_during_pause": _case(Free, "meanwhile"),
    "pause_none": _case(Pause, "none", granule=GPU_GRANULE),
    "pause_host": _case(Pause, "host"),
    "pause_host_kept": _case(Pause, "host", kept=True, granule=TWO_PIECES),
    "pause_pageable": _case(Pause, "pageable"),
    "pause_pageable_kept": _case(Pause, "pageable", kept=True, granule=TWO_PIECES),
    "pause_disk": _case(Pause, "disk"),
    "pause_disk_kept": _case(Pause, "disk", kept=True, granule=TWO_PIECES),
    "pause_disk_named": _case(DiskNamed, "disk"),
    "pause_disk_cached": _case(DiskCached, "disk"),
    "pause_peer": _case(Pause, "peer", devices=2),
    "pause_peer_kept": _case(Pause, "peer", kept=True, granule=TWO_PIECES, devices=2),
    "pause_peer_nearly_full": _case(NeighbourNearlyFull, "peer", devices=2),
    "pause_shareable": _case(Pause, "host", shareable=True),
    "pause_two_devices": _case(Pause, "host", devices=2),
    "pause_background": _case(Pause, "host", background=True),
    "pause_graph": _case(Graph, "pause"),
    "resume_none": _case(Resume, "none", granule=GPU_GRANULE),
    "resume_host": _case(Resume, "host"),
    "resume_pageable": _case(Resume, "pageable"),
    "resume_disk": _case(Resume, "disk"),
    "resume_peer": _case(Resume, "peer", devices=2),
    "resume_shareable": _case(Resume, "host", shareable=True),
    "resume_unrestored": _case(Unrestored, "host"),
    "resume_two_devices": _case(Resume, "host", devices=2),
    "resume_background": _case(Resume, "host", background=True, granule=GPU_GRANULE),
    "resume_graph": _case(Graph, "resume"),
    "swap_host_host": _case(Swap, "host", "host"),
    "swap_host_none": _case(Swap, "host", "none"),
    "swap_none_host": _case(Swap, "none", "host", granule=GPU_GRANULE),
    "swap_pageable_disk": _case(Swap, "pageable", "disk"),
    "swap_peer_peer": _case(Swap, "peer", "peer"),
    "swap_shareable": _case(Swap, "host", "host", shareable=True),
    "swap_background": _case(Swap, "host", "host", background=True),
    "share": _case(Share),
    "import_from_killed": _case(Import),
    "import_after_killed": _case(Import, answers=0),
    "import_after_half_killed": _case(Import, answers=1),
    "release_of_killed": _case(Release),
    "fingerprint": _case(Ask, _fingerprint, granule=TWO_PIECES),
    "backup_view": _case(Ask, _view, paused=True),
    "stats": _case(Ask, lambda asked: asked.memsaver.stats()),
    "timeline": _case(Ask, _timeline),
    "trim": _case(Ask, lambda asked: asked.memsaver.trim(wait=True)),
    "first_device": _case(FirstUse, pausing=False),
    "first_pause": _case(FirstUse, pausing=True),
    "first_pause_peer": _case(FirstUse, pausing=True, backup="peer"),
}
