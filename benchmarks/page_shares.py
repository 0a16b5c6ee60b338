"""Compute the fraction of an engine's weights that is in pages equal to a trainer's pages.

Two pages are equal if both contain the same bytes of the same tensors at the same offsets, and no
other tensors. Unused bytes are ignored. Only equal pages could be mapped instead of copied.
A piece of physical memory can be mapped only as a whole, so pages may be larger than the
granularity of 2 MiB.

There are two placements: "torch" places allocations like torch's allocator, and "boundaries" places
each allocation at a multiple of 2 MiB. See weight_layouts.py for the layouts.

usage: page_shares.py      prints the table
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import Any

import weight_layouts
from weight_layouts import Allocation, Run

MIB = 1 << 20
PAGE = 2 * MIB
PAGES_MIB = (2, 32, 256)

# Runs with their addresses, in address order.
Placed = list[tuple[int, Run]]
# The runs in a page, each with its place in the page.
Content = tuple[tuple[int, Run], ...]

# torch's allocator (c10/cuda/CUDACachingAllocator): requests up to SMALL come from segments of
# 2 MiB; others below LARGE from segments of 20 MiB; larger ones have a segment of their own.
ROUND = 512
SMALL = MIB
LARGE = 10 * MIB


class TorchAllocator:
    """The addresses that torch's allocator returns if no memory is freed."""

    def __init__(self) -> None:
        self.end = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (bytes, address)

    def allocate(self, nbytes: int) -> int:
        """Return the address of a new block."""
        nbytes = max(ROUND, _rounded(nbytes, ROUND))
        small = nbytes <= SMALL
        free = self._free[small]
        place = bisect.bisect_left(free, (nbytes, -1))
        if place == len(free):
            segment = PAGE if small else 20 * MIB if nbytes < LARGE else _rounded(nbytes, PAGE)
            bisect.insort(free, (segment, self.end))
            self.end += segment
            place = bisect.bisect_left(free, (nbytes, -1))
        size, address = free.pop(place)
        rest = size - nbytes
        if rest >= ROUND if small else rest > SMALL:
            bisect.insort(free, (rest, address + nbytes))
        return address


class AtBoundaries:
    """Addresses at multiples of 2 MiB."""

    def __init__(self) -> None:
        self.end = 0

    def allocate(self, nbytes: int) -> int:
        """Return the address of a new block."""
        address = self.end
        self.end += _rounded(nbytes, PAGE)
        return address


PLACEMENTS: dict[str, Callable[[], TorchAllocator | AtBoundaries]] = {
    "torch": TorchAllocator,
    "boundaries": AtBoundaries,
}


def _rounded(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def placed(layout: list[Allocation], placement: str) -> tuple[Placed, int]:
    """Return the runs of a layout with their addresses, and the size of the layout's memory."""
    allocator = PLACEMENTS[placement]()
    found: Placed = []
    for allocation in layout:
        at = allocator.allocate(sum(run.nbytes for run in allocation))
        for run in allocation:
            found.append((at, run))
            at += run.nbytes
    return sorted(found, key=lambda pair: pair[0]), allocator.end


def contents(runs: Placed, page: int) -> dict[int, Content]:
    """Return the contents of the pages that contain weights, by page number."""
    found: dict[int, list[tuple[int, Run]]] = {}
    for address, run in runs:
        done = 0
        while done < run.nbytes:
            number, place = divmod(address + done, page)
            count = min(run.nbytes - done, page - place)
            piece = Run(run.tensor, run.offset + done, count)
            before = found.setdefault(number, [])
            if before and _continues(before[-1], place, piece):
                place, first = before.pop()
                piece = Run(first.tensor, first.offset, first.nbytes + count)
            if run.tensor:  # padding has no name
                before.append((place, piece))
            done += count
    return {number: tuple(pieces) for number, pieces in found.items() if pieces}


def _continues(before: tuple[int, Run], place: int, run: Run) -> bool:
    start, last = before
    return (last.tensor, last.offset + last.nbytes, start + last.nbytes) == (
        run.tensor,
        run.offset,
        place,
    )


def share(engine: Placed, trainer: Placed, page: int) -> tuple[int, int]:
    """Return the bytes of the engine's weights in equal pages, and the number of page runs.

    A page run is a sequence of equal pages that are adjacent in both the engine's memory and the
    trainer's memory. To let the engine map the pages, the trainer's memory must consist of at least
    as many pieces as there are page runs.
    """
    numbers = {content: number for number, content in contents(trainer, page).items()}
    total, count, last = 0, 0, (-2, -2)
    for number, content in sorted(contents(engine, page).items()):
        if content in numbers:
            here = number, numbers[content]
            count += here != (last[0] + 1, last[1] + 1)
            total += sum(run.nbytes for _, run in content)
            last = here
    return total, count


# The model, the number of the engine's ranks, and the trainer.
CASES: tuple[tuple[str, int, str], ...] = (
    ("Qwen3-8B", 1, "whole tensors"),
    ("Qwen3-8B", 2, "whole tensors"),
    ("Qwen3-8B", 2, "FSDP2"),
    ("Qwen3-8B", 1, "Megatron"),
    ("Qwen3-8B", 2, "Megatron"),
    ("Qwen3-8B", 2, "Megatron, distributed optimizer"),
    ("Qwen3-0.6B", 1, "whole tensors"),
    ("Qwen2.5-7B", 1, "whole tensors"),
    ("Qwen2.5-7B", 2, "FSDP2"),
    ("Qwen3-30B-A3B", 1, "whole tensors"),
)


def shares() -> Iterator[dict[str, Any]]:
    """Yield a row for each case and placement.

    A row contains, for each page size, the percentage of the first engine rank's weights that lies
    in equal pages.
    """
    for name, ranks, trainer in CASES:
        model = weight_layouts.MODELS[name]
        layouts = (
            weight_layouts.engine(model, 0, ranks),
            weight_layouts.TRAINERS[trainer](model, 0, ranks),
        )
        for placement in PLACEMENTS:
            (ours, size), (theirs, _) = (placed(layout, placement) for layout in layouts)
            weights = sum(run.nbytes for _, run in ours)
            found = {mib: share(ours, theirs, mib * MIB) for mib in PAGES_MIB}
            yield {
                "model": name,
                "engine_ranks": ranks,
                "trainer": trainer,
                "placement": placement,
                "unused_percent": round(100 * (size - weights) / weights, 2),
                "runs": found[PAGES_MIB[0]][1],
                **{f"{mib}_MiB": round(100 * part[0] / weights, 1) for mib, part in found.items()},
            }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows of `shares` as Markdown, with a line for each case."""
    sizes = " | ".join(f"{mib} MiB" for mib in PAGES_MIB)
    by_case: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        case = row["model"], str(row["engine_ranks"]), row["trainer"]
        parts = " | ".join(f"{row[f'{mib}_MiB']:.1f}" for mib in PAGES_MIB)
        cells = f"{parts} | {row['runs']:,}"
        by_case.setdefault(case, {})[row["placement"]] = cells
    lines = [
        f"| model | engine's ranks | trainer | {sizes} | pieces "
        f"| at boundaries: {sizes} | pieces |",
        "|---|--:|---|" + "--:|" * 2 * (len(PAGES_MIB) + 1),
    ]
    for case, found in by_case.items():
        lines.append(f"| {' | '.join((*case, found['torch'], found['boundaries']))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(list(shares())))
