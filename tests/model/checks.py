"""Compares memsaver's and the driver's reports with the model; an AssertionError names each
difference.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import get_args

import memsaver
from memsaver._runtime.native import _C
from model.expected import PAGE, UNIT, Allocation, Tag
from model.place import DEVICES, Place

BACKUPS = list(get_args(memsaver.Backup))
_ENDS = 512  # bytes at each end of a block that are compared every time


def require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def check_tag(place: Place, tag: Tag, *, wholly: bool) -> set[tuple[int, int]]:
    """Check a tag's state, addresses, and contents (all bytes, or only the ends of its blocks).

    Returns the (device, page) pairs that are still accessible in a paused tag.
    """
    state = memsaver.state(tag.name)
    require(state == ("paused" if tag.paused else "mapped"), f"{tag.name} is {state}")
    ranges = memsaver.ranges(tag.name)
    require(ranges == tuple(tag.ranges()), f"{tag.name} has {ranges}, not {tag.allocations}")
    reachable = set()
    for allocation in tag.allocations:
        if not tag.paused:
            check_contents(place, allocation, wholly=wholly)
        elif place.accessible(allocation.address):
            reachable.add((allocation.device, allocation.address // PAGE))
    return reachable


def check_contents(place: Place, allocation: Allocation, *, wholly: bool) -> None:
    nbytes = allocation.nbytes
    parts = (
        [(0, nbytes)] if wholly or nbytes <= 2 * _ENDS else [(0, _ENDS), (nbytes - _ENDS, nbytes)]
    )
    for start, end in parts:
        wrong = place.difference(allocation.address, allocation.contents, start, end)
        require(wrong is None, f"{allocation.tag.name}, a block of {nbytes} bytes: {wrong}")


def check_location(allocation: Allocation, offset: int) -> None:
    """Check that a lookup of an interior address returns the correct block."""
    found = _C.locate(allocation.address + offset)
    tag, device = allocation.tag, allocation.device
    expected = (tag.name, device, 2 if tag.paused else 0, allocation.address, allocation.nbytes)
    require(found is not None and found[:5] == expected, f"{found} is not {expected}")


def agrees(tag: Tag, device: int, row: SimpleNamespace) -> bool:
    """Return whether a tag's statistics on a device are possible."""
    nbytes = tag.nbytes(device)
    if BACKUPS[row.backup] != tag.policy or (not tag.paused and row.resident_bytes < nbytes):
        return False
    if tag.owing:
        if row.allocated_bytes < nbytes:
            return False
    elif (row.allocations, row.allocated_bytes, nbytes % UNIT) != (len(tag.on(device)), nbytes, 0):
        return False
    if tag.retained:
        return True
    if row.backup_bytes != (nbytes if tag.paused and tag.kept else 0):
        return False
    if tag.paused and not tag.owing and row.resident_bytes != 0:
        return False
    in_memory = row.host_bytes + row.peer_bytes
    return bool((row.disk_bytes if tag.saved == "disk" else in_memory) >= row.backup_bytes)


def check_statistics(
    place: Place, tags: list[Tag], deferring: set[int], reachable: set[tuple[int, int]]
) -> None:
    """Check every tag's statistics, and that their sums equal the driver's totals.

    On the devices in `deferring`, the driver's total can be higher by up to the size of the
    deferred releases, and paused memory of at most this size can be accessible. The check removes
    devices with equal totals from `deferring`.
    """
    physical = place.sim.counts().physical_bytes
    deferred = _C.deferred_releases()[1]
    found = [SimpleNamespace(**row) for row in _C.stats()]  # faster than stats()
    rows = {(row.tag, row.device): row for row in found}
    for tag in tags:
        for device in range(DEVICES):
            row = rows.get((tag.name, device))
            if row is None:
                require(not tag.on(device), f"no figures of {tag.name} on device {device}")
            elif not agrees(tag, device, row):
                raise AssertionError(f"{tag.name} on device {device}: {row}")
    for device in range(DEVICES):
        reported = sum(row.resident_bytes for row in found if row.device == device)
        # The backups of one of the two devices are on the other one.
        backups = sum(row.peer_bytes for row in found if row.device != device)
        held = place.held(physical, device) - backups
        more = deferred if device in deferring else 0
        holds = reported <= held <= reported + more
        require(holds, f"device {device}: {reported} bytes are reported, the driver counts {held}")
        if held == reported:
            deferring.discard(device)
        there = held - reported
        there += sum(
            rows[tag.name, device].resident_bytes
            for tag in tags
            if tag.paused and (tag.name, device) in rows
        )
        pages = Counter(where for where, _ in reachable)[device]
        require(pages * PAGE <= there, f"device {device}: paused memory is there: {reachable}")
