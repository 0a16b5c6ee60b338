"""Suspends an engine's NCCL communicators while its memory is released, on all ranks or on none.

In each call, NCCL waits indefinitely for the communicator's other ranks. A communicator is
therefore suspended only if all of its ranks participate, which the ranks verify by exchanging lists
of their communicators. Before a resume, all ranks check that enough memory is free, because if
NCCL's call failed on one rank, the other ranks would wait indefinitely and the communicator would
be lost.

A call spends most of its time on NCCL's messages between the ranks, so the calls for several
communicators run at the same time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import memsaver
from memsaver._runtime.text import size_text
from memsaver.errors import OutOfDeviceMemoryError

from . import nccl
from .errors import EngineError, EngineTimeoutError
from .messages import RankReport
from .nccl import Call, Communicator, Key, Nccl, loaded
from .ranks import Group, first_failure

__all__ = ["Suspender", "of_groups", "of_torch"]

_SPARE = 64 << 20  # bytes that other allocations may take between the check and the resume
_AMPLE = 1 << 30  # additional bytes that must be free to resume other memory at the same time


class Suspender:
    """Suspends and resumes this process's communicators. Every method is collective.

    Args:
        find: a function that returns the communicators in this process that may be suspended.
        device: the device of their memory.
    """

    def __init__(self, find: Callable[[], list[Communicator]], device: int) -> None:
        self._find = find
        self._device = device
        self._suspended: dict[Key, Communicator] = {}
        self._lost = ""  # the error of a call in which another rank did not take part

    def suspend(self, group: Group) -> list[RankReport]:
        """Suspend the communicators that have memory and whose ranks all belong to `group`.

        After a failure, some communicators may be suspended; `resume` resumes them. If a
        communicator is suspended on only some of its ranks, every later `resume` fails. If a rank
        is still waiting in NCCL for a failed rank, every later `suspend` and `resume` fails.
        """
        found: list[Communicator] = []

        def find() -> None:
            if self._lost:
                raise EngineError(self._lost)
            found.extend(
                one
                for one in self._find()
                if one.nccl.can_suspend
                and one.key not in self._suspended
                and not one.nccl.is_suspended(one.handle)
                and one.nccl.suspendable_bytes(one.handle)
            )

        ranks = group.attempt(find)
        if first_failure(ranks):
            return ranks
        chosen, _, _ = _complete(group, found)
        calls = [(one, one.nccl.begin_suspend(one.handle)) for one in chosen]

        def end() -> None:
            for one in self._ended(calls):
                self._suspended[one.key] = one

        return group.attempt(end)

    def resume(
        self, group: Group, nbytes: Callable[[], int], work: Callable[[], list[RankReport]]
    ) -> tuple[list[RankReport], list[RankReport]]:
        """Resume all suspended communicators, and call `work`.

        If every rank has ample memory, the resume and `work` run at the same time, because `work`
        mostly waits for copies and the resume mostly waits for the driver. Otherwise, `work` runs
        after the resume.

        Reports a failure and changes nothing if a rank lacks memory for the communicators, or if a
        communicator cannot be resumed because `suspend` failed. `work` may have run even if a
        communicator's resume fails.

        Args:
            group: the ranks.
            nbytes: a function that returns the bytes of device memory that `work` allocates on this
                rank.
            work: a collective call that reports its failures and uses no communicator.

        Returns:
            The ranks' reports of the resume and of `work`; the reports of `work` are empty if it
            did not run.
        """
        chosen, lacking, is_any = _complete(group, list(self._suspended.values()))
        has_room = False

        def check() -> None:
            nonlocal has_room
            has_room = self._check(chosen, lacking, nbytes())

        ranks = group.attempt(check)
        if first_failure(ranks):
            return ranks, []
        if not is_any:
            return ranks, work()
        has_room = all(each["room"] for each in group.gather({"room": has_room}))
        calls = [(one, one.nccl.begin_resume(one.handle)) for one in chosen]
        worked: list[RankReport] = []
        if has_room:
            try:
                worked = work()
            except BaseException:
                self._lost = "a resume of NCCL's communicators was interrupted; restart the engine"
                raise

        def end() -> None:
            for one in self._ended(calls):
                del self._suspended[one.key]

        ranks = group.attempt(end)
        if not has_room and not first_failure(ranks):
            worked = work()
        return ranks, worked

    def _check(
        self, chosen: Sequence[Communicator], lacking: Sequence[Communicator], nbytes: int
    ) -> bool:
        """Return whether `nbytes` can be mapped during a resume.

        Raises an error if the resume would fail.
        """
        if self._lost:
            raise EngineError(self._lost)
        if lacking:
            raise EngineError(
                f"the NCCL communicator {lacking[0].name!r} is suspended on only some of its "
                "ranks, because a suspend failed: restart the engine"
            )
        needed = sum(one.nccl.suspendable_bytes(one.handle) for one in chosen)
        if not needed:
            return True
        needed += _SPARE
        free = memsaver.device_memory(self._device)[0]
        if free < needed:
            error = OutOfDeviceMemoryError(
                f"the engine's NCCL communicators need {size_text(needed)} on device "
                f"{self._device}, where {size_text(free)} are free: free memory, then resume again"
            )
            error.needed, error.free, error.device = needed, free, self._device
            raise error
        return free >= needed + nbytes + _AMPLE

    def _ended(self, calls: Iterable[tuple[Communicator, Call]]) -> Iterator[Communicator]:
        """Yield the communicators whose calls succeed, then raise the first error.

        NCCL cannot cancel a call that still waits for other ranks. Such a call's timeout is
        recorded for later calls. It is raised only if no call failed with another error, which
        might be its cause.
        """
        deadline = time.monotonic() + nccl.SECONDS
        errors: list[Exception] = []
        for one, call in calls:
            try:
                call.wait(max(0.0, deadline - time.monotonic()))
            except EngineTimeoutError as error:
                self._lost = str(error)
                errors.append(error)
            except Exception as error:
                errors.insert(0, error)
            else:
                yield one
        if errors:
            raise errors[0]


def _complete(
    group: Group, mine: Sequence[Communicator]
) -> tuple[list[Communicator], list[Communicator], bool]:
    """Divide this rank's communicators into those that all of their ranks list, and the rest.

    Collective. Also returns whether any rank lists any communicator.
    """
    listed = group.gather({"each": [[one.name, list(one.ranks), one.rank] for one in mine]})
    places: dict[Key, list[int]] = {}
    for fields in listed:
        for name, ranks, rank in fields["each"]:
            places.setdefault((name, tuple(ranks)), []).append(rank)
    whole = {key for key, at in places.items() if sorted(at) == list(range(len(key[1])))}
    return (
        [one for one in mine if one.key in whole],
        [one for one in mine if one.key not in whole],
        bool(places),
    )


def of_torch(device: int) -> list[Communicator]:
    """Return the communicators of torch's process groups on a device, except unused ones."""
    torch: Any = sys.modules.get("torch")  # without torch, there are no torch communicators
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
            order = tuple(sorted(ranks, key=ranks.__getitem__))
            name = f"torch {group.group_name}"
            found.append(Communicator(name, order, group.rank(), handle, library))
    return found


def of_groups(engine: str, module: str) -> list[Communicator]:
    """Return the communicators that an engine creates itself for its groups of ranks.

    Args:
        engine: the prefix of the communicators' names.
        module: the engine's module that defines its groups; the result is empty unless this module
            is imported.
    """
    found = []
    for name, reference in list(getattr(sys.modules.get(module), "_groups", {}).items()):
        owner = reference()
        # SGLang's group holds the communicator; vLLM's group holds an object that contains it.
        own: Any = getattr(owner, "pynccl_comm", None) or getattr(
            getattr(owner, "device_communicator", None), "pynccl_comm", None
        )
        handle = getattr(getattr(own, "comm", None), "value", None)
        if handle:
            library = Nccl(own.nccl.lib)
            ranks = tuple(owner.ranks)
            found.append(Communicator(f"{engine} {name}", ranks, own.rank, handle, library))
    return found


def _handle(group: Any, device: Any) -> int:
    """Return the address of a process group's communicator on a device; 0 if it has none."""
    try:
        return int(group._get_backend(device)._comm_ptr())
    except (AttributeError, RuntimeError):  # not an NCCL group, or not used yet
        return 0
