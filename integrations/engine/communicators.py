"""Suspends an engine's NCCL communicators while its memory is released, on all ranks or on none.

NCCL waits in each call for the other ranks of the communicator, without a bound. So a communicator
is suspended only if all of its ranks take part here, which the ranks find out by an exchange; all
ranks proceed in the same order; and before a resume, all ranks check that its memory is free,
because a rank that fails would leave the others waiting.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import memsaver
from memsaver._runtime.text import size_text
from memsaver.errors import OutOfDeviceMemoryError

from .errors import EngineError, EngineTimeoutError
from .messages import RankReport
from .nccl import Communicator, Nccl, loaded
from .ranks import Group, first_failure

__all__ = ["Suspender", "of_torch"]

_SPARE = 64 << 20  # bytes that other allocations may take between the check and the resume


class Suspender:
    """Suspends and resumes this process's communicators. Every method is collective.

    Args:
        find: returns the communicators of this process that may be suspended.
        device: the device of their memory.
    """

    def __init__(self, find: Callable[[], list[Communicator]], device: int) -> None:
        self._find = find
        self._device = device
        self._suspended: list[Communicator] = []
        self._lost = ""  # the error of a call in which another rank did not take part

    def suspend(self, group: Group) -> list[RankReport]:
        """Suspend the communicators whose ranks all belong to `group`, and that have memory.

        After a failure, `resume` resumes those that all of their ranks have suspended. If a rank
        has failed in NCCL's call, the others wait in theirs, and no `resume` succeeds any more.
        """
        found: list[Communicator] = []

        def find() -> None:
            known = {one.key for one in self._suspended}
            found.extend(
                one
                for one in self._find()
                if one.library.can_suspend
                and one.key not in known
                and not one.library.is_suspended(one.handle)
                and one.library.suspendable_bytes(one.handle)
            )

        ranks = group.attempt(find)
        if first_failure(ranks):
            return ranks
        chosen, _ = _complete(group, found)
        return group.attempt(lambda: self._suspend(chosen)) if chosen else ranks

    def _suspend(self, chosen: Sequence[Communicator]) -> None:
        with self._noting_loss():
            for one in chosen:
                one.library.suspend(one.handle)
                self._suspended.append(one)

    def resume(self, group: Group) -> list[RankReport]:
        """Resume all suspended communicators. If memory is short on a rank, none is resumed."""
        chosen, lacking = _complete(group, self._suspended)
        ranks = group.attempt(lambda: self._check(chosen, lacking))
        if first_failure(ranks):
            return ranks
        return group.attempt(lambda: self._resume(chosen))

    def _check(self, chosen: Iterable[Communicator], lacking: Sequence[Communicator]) -> None:
        if self._lost:
            raise EngineError(self._lost)
        if lacking:
            raise EngineError(
                f"the NCCL communicator {lacking[0].name!r} is suspended on only some of its "
                "ranks, because a suspend failed: restart the engine"
            )
        needed = sum(one.library.suspendable_bytes(one.handle) for one in chosen)
        free = memsaver.device_memory(self._device)[0] if needed else 0
        if needed and free < needed + _SPARE:
            error = OutOfDeviceMemoryError(
                f"the engine's NCCL communicators need {size_text(needed + _SPARE)} on device "
                f"{self._device}, where {size_text(free)} are free: free memory, then resume again"
            )
            error.needed, error.free, error.device = needed + _SPARE, free, self._device
            raise error

    def _resume(self, chosen: Iterable[Communicator]) -> None:
        with self._noting_loss():
            for one in chosen:
                one.library.resume(one.handle)
                self._suspended.remove(one)

    @contextlib.contextmanager
    def _noting_loss(self) -> Iterator[None]:
        """Keep the error of a call that still waits for other ranks, which NCCL cannot cancel."""
        try:
            yield
        except EngineTimeoutError as error:
            self._lost = str(error)
            raise


def _complete(
    group: Group, mine: Sequence[Communicator]
) -> tuple[list[Communicator], list[Communicator]]:
    """Split communicators into those that all of their ranks list, and the others. Collective.

    Both lists are in the same order on all ranks.
    """
    listed = group.gather({"each": [[one.name, list(one.ranks), one.rank] for one in mine]})
    places: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for fields in listed:
        for name, ranks, rank in fields["each"]:
            places.setdefault((name, tuple(ranks)), []).append(rank)
    mine = sorted(mine, key=lambda one: one.key)
    whole = [sorted(places[one.key]) == list(range(len(one.ranks))) for one in mine]
    return (
        [one for one, is_whole in zip(mine, whole, strict=True) if is_whole],
        [one for one, is_whole in zip(mine, whole, strict=True) if not is_whole],
    )


def of_torch(device: int) -> list[Communicator]:
    """Return the communicators of torch's process groups on a device, without unused ones."""
    torch: Any = sys.modules.get("torch")  # a process without torch has none of its communicators
    library = loaded()
    if library is None or torch is None:
        return []
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return []
    found = []
    for group, ranks in list(distributed.distributed_c10d._world.pg_group_ranks.items()):
        handle = _handle(group, torch.device("cuda", device))
        if handle:
            order = sorted(ranks, key=ranks.__getitem__)
            found.append(_of_group(group, tuple(order), handle, library))
    return found


def _of_group(group: Any, ranks: tuple[int, ...], handle: int, library: Nccl) -> Communicator:
    return Communicator(f"torch {group.group_name}", ranks, group.rank(), handle, library)


def _handle(group: Any, device: Any) -> int:
    """Return the address of a process group's communicator on a device; 0 if there is none."""
    try:
        return int(group._get_backend(device)._comm_ptr())
    except (AttributeError, RuntimeError):  # not an NCCL group, or not used yet
        return 0
