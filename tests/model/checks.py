"""What memsaver and the driver say, compared with the model; AssertionErrors say what differs."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import memsaver
from memsaver.native import _C
from model.expected import PAGE, UNIT, Allocation, Tag
from model.place import DEVICES, Place

BACKUPS = [backup.value for backup in memsaver.Backup]
_ENDS = 512  # bytes of each end of a block that are looked at every time


def require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


def check_tag(place: Place, tag: Tag, *, wholly: bool) -> set[tuple[int, int]]:
    """Its state, its addresses, its contents: all of them, or the ends of its blocks.

    Gives the pages, with their devices, that can be reached though the tag is paused.
    """
    state = memsaver.state(tag.name)
    require(state == ("paused" if tag.paused else "mapped"), f"{tag.name} is {state}")
    require(memsaver.ranges(tag.name) == tuple(tag.ranges()), f"{tag.name} has other addresses")
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
    """An interior address finds its block."""
    found = _C.locate(allocation.address + offset)
    tag, device = allocation.tag, allocation.device
    expected = (tag.name, device, 2 if tag.paused else 0, allocation.address, allocation.nbytes)
    require(found is not None and found[:5] == expected, f"{found} is not {expected}")


def check_statistics(
    place: Place, tags: list[Tag], strays: set[int], reachable: set[tuple[int, int]]
) -> None:
    """Every figure of every tag; and that together they are what the driver counts.

    Where the driver may hold strays, it may count more, and so much of what is paused may be
    reached. Devices are taken out of `strays` where it does not.
    """
    physical = place.sim.counts().physical_bytes
    found = [SimpleNamespace(**row) for row in _C.stats()]  # faster than all that stats() asks
    rows = {(row.tag, row.device): row for row in found}
    for tag in tags:
        for device in range(DEVICES):
            row = rows.get((tag.name, device))
            if row is None:
                require(not tag.on(device), f"no figures of {tag.name} on device {device}")
                continue
            nbytes = tag.nbytes(device)
            where = f"{tag.name} on device {device}: {row}"
            require(BACKUPS[row.backup] == tag.policy, where)
            if tag.owing:
                require(row.allocated_bytes >= nbytes, where)
            else:
                require(row.allocations == len(tag.on(device)), where)
                require(row.allocated_bytes == nbytes and nbytes % UNIT == 0, where)
            if not tag.parked:
                saved = nbytes if tag.paused and tag.kept else 0
                require(row.backup_bytes == saved, where)
                require(not tag.paused or tag.owing or row.resident_bytes == 0, where)
                holds = row.disk_bytes if tag.saved == "disk" else row.host_bytes
                require(holds >= row.backup_bytes, where)
            require(tag.paused or row.resident_bytes >= nbytes, where)
    for device in range(DEVICES):
        reported = sum(row.resident_bytes for row in found if row.device == device)
        held = place.held(physical, device)
        holds = held >= reported if device in strays else held == reported
        require(holds, f"device {device}: {reported} bytes are reported, the driver counts {held}")
        if held == reported:
            strays.discard(device)
        there = held - reported
        there += sum(
            rows[tag.name, device].resident_bytes
            for tag in tags
            if tag.paused and (tag.name, device) in rows
        )
        pages = Counter(where for where, _ in reachable)[device]
        require(pages * PAGE <= there, f"device {device}: paused memory is there: {reachable}")
