"""Make sleep and wake-up in vLLM's worker processes take effect on all ranks or on none.

vLLM's executor calls `Worker.sleep`, `Worker.wake_up` and `Worker.discard` on every rank, and each
rank acts independently. If one rank fails, the other ranks end up in a different state. The
multiprocessing executor also leaves the responses of the following ranks in its queues, and its
next call would read them. This module's hooks wrap these methods: the ranks exchange their results,
and if the call failed on any rank, all ranks undo it. Only the rank whose response the executor
reads last raises an error.

| event | state afterwards, on every rank |
|---|---|
| a sleep is rejected before it runs | mapped, with contents |
| a sleep fails later | mapped; contents without a backup may be lost |
| a wake-up fails | still released, with backups; the call may be repeated |

If the rollback of a sleep also fails, the sleep counts as successful, so that the engine does not
use memory that is released on a rank. The next wake-up maps this memory. The method
`memsaver_state`, which collective_rpc calls by name, returns the last answer and the state of the
memory.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from ..engine import held, moves
from ..engine.answers import failure_of, last_answer, name_of, next_answer
from ..engine.communicators import of_groups, of_torch
from ..engine.hooking import wrapped
from ..engine.messages import Answer, RankReport, SchedulerState, raisable
from ..engine.ranks import first_failure
from ..engine.tags import KV_CACHE, RELEASE_ORDER, WEIGHTS
from . import settings
from .allocator import DEFERRABLE, MemsaverAllocator
from .executor_ranks import group_of
from .kept import keeps_cache_state, restores_draft, saves_draft
from .logs import logger
from .protocol import RELEASE_PART, WAKE_REWRITTEN
from .reload import domain_of
from .rewritten import save_buffers
from .steps import Step
from .wake_order import in_any_order, saved

__all__ = ["install", "installed_allocator", "memsaver_state"]

CUMEM = "vllm.device_allocator.cumem"
_PARALLEL = "vllm.distributed.parallel_state"
_TRANSFERS = "vllm.distributed.kv_transfer"
_OPERATIONS = {"sleep": "release", "wake_up": "resume", "discard": "release"}
_UNDO_NOTHING = {
    "release": lambda group: moves.resume(group, []),
    "resume": lambda group: moves.pause(group, []),
}
# Executors that run one rank each, so every rank raises the error.
_OF_ONE_RANK = ("external_launcher", "uni")


def install(worker: Any) -> None:
    """Add memsaver's methods to vLLM's worker class, and wrap its sleep. Idempotent.

    Raises:
        AttributeError: the class does not have the expected methods.
    """
    if "memsaver_state" in vars(worker):
        return
    worker.sleep = saves_draft(worker.sleep, installed_allocator)
    wake_up = in_any_order(restores_draft(worker.wake_up), installed_allocator)
    worker.wake_up = wake_up
    pool = keeps_cache_state(worker._maybe_get_memory_pool_context, installed_allocator)
    worker._maybe_get_memory_pool_context = pool
    part = _of_part(worker.sleep)
    setattr(worker, RELEASE_PART, _hooked("release", part, wake_up, names_tags=True))
    for name, operation in _OPERATIONS.items():
        if name != "discard" or hasattr(worker, name):  # vLLM 0.26 has no discard
            hooked = _hooked(operation, getattr(worker, name), wake_up, name == "discard")
            setattr(worker, name, hooked)
    setattr(worker, WAKE_REWRITTEN, _wake_rewritten)
    worker.memsaver_state = memsaver_state
    worker.__init__ = wrapped("AROUND", worker.__init__, settings.fix_policy)


def _of_part(sleep: Callable[..., None]) -> Callable[..., None]:
    """Return a variant of a worker's sleep that can release a subset of the deferrable tags.

    The sleep of the last mapped deferrable tag also releases all other memory, as a sleep of both
    tags does.
    """

    def call(worker: Any, tags: Sequence[str], level: int) -> None:
        allocator = installed_allocator()
        assert allocator is not None  # the engine core has checked this
        is_last = set(DEFERRABLE) <= {*tags, *allocator.released}
        chosen = contextlib.nullcontext() if is_last else allocator.only(tags)
        with chosen, _connected(tags):
            sleep(worker, level if WEIGHTS in tags else 1)

    return call


def _wake_rewritten(worker: Any, tags: list[str]) -> None:
    """Wake tags that include the weights, which are about to be rewritten on all ranks."""
    allocator = installed_allocator()
    assert allocator is not None  # the core has checked this
    # The ranks decide together, because the backups of only some of them might be on disk.
    votes = group_of(worker).gather({"saved": save_buffers(worker, allocator)})
    is_rewritten = all(vote["saved"] for vote in votes)
    with allocator.rewriting([WEIGHTS]) if is_rewritten else contextlib.nullcontext():
        worker.wake_up(tags)


@contextlib.contextmanager
def _connected(tags: Sequence[str]) -> Iterator[None]:
    """Keep the KV cache's registrations with vLLM's connector, unless the cache is released.

    Since vLLM 0.33, a worker's sleep removes these registrations, and only a wake-up of the KV
    cache restores them.
    """
    transfers = sys.modules.get(_TRANSFERS)
    if KV_CACHE in tags or transfers is None or not transfers.has_kv_transfer_group():
        yield
        return
    connector = transfers.get_kv_transfer_group()
    connector.unregister_kv_caches = lambda: None
    try:
        yield
    finally:
        del connector.unregister_kv_caches


def installed_allocator() -> MemsaverAllocator | None:
    """Return the process's allocator, or None if vLLM does not use memsaver in this process."""
    owner = getattr(sys.modules.get(CUMEM), "CuMemAllocator", None)
    found = getattr(owner, "instance", None)
    return found if isinstance(found, MemsaverAllocator) else None


def memsaver_state(worker: Any, measures: bool = False) -> dict[str, Any]:
    """Return the `SchedulerState` of this rank's memory, as JSON values.

    The value of `idle` is always True, because a worker does not know which requests are waiting.

    Args:
        worker: vLLM's worker.
        measures: whether this rank's own report (`RankReport.held`) includes the memory that is
            still in use after a release of all memory.
    """
    allocator = installed_allocator()
    released = allocator.released if allocator is not None else ()
    last = last_answer(worker)
    if measures and last is not None and set(DEFERRABLE) <= set(released):
        last = replace(last, ranks=_measured(last.ranks, group_of(worker).rank))
    state = SchedulerState(
        name_of(worker),
        tuple(sorted(set(released).intersection(RELEASE_ORDER))),
        True,
        last,
        settings.policy_of(worker).when_asleep,
        domain=domain_of(worker),
    )
    return asdict(state)


def _measured(ranks: Sequence[RankReport], own: int) -> tuple[RankReport, ...]:
    """Return the reports; add this device's memory in use to the report of rank `own`."""
    device = held.device()
    try:
        found = held.measure(device, [*of_torch(device), *of_groups("vllm", _PARALLEL)])
    except Exception as error:
        logger.warning("the memory that is still in use is unknown: %s", error)
        return tuple(ranks)
    return tuple(replace(one, held=found) if one.rank == own else one for one in ranks)


def _hooked(
    operation: str,
    original: Callable[..., None],
    wake_up: Callable[..., None],
    names_tags: bool = False,
) -> Callable[..., None]:
    @functools.wraps(original)
    def call(worker: Any, *arguments: Any, **named: Any) -> None:
        allocator = installed_allocator()
        if allocator is None:
            original(worker, *arguments, **named)
            return
        before_the_call = {name: copy.copy(value) for name, value in saved(worker).items()}
        before = set(allocator.released)
        group = group_of(worker)
        step = Step(group, _UNDO_NOTHING[operation])
        step.run(lambda: original(worker, *arguments, **named))
        if step.failed and operation == "release" and not first_failure(step.undone):
            tags: Sequence[str] = DEFERRABLE
            if names_tags:
                tags = arguments[0] if arguments else named["tags"]
                tags = [tags] if isinstance(tags, str) else tags
            with allocator.only(()):  # the memory is mapped again, or was released before
                _wake(worker, wake_up, [tag for tag in tags if tag not in before])
        if step.failed:
            for name in saved(worker):
                delattr(worker, name)
            vars(worker).update(before_the_call)
        answer = _answer(worker, operation, step, before ^ set(allocator.released), allocator)
        if answer.failure is None:
            return
        if operation == "release" and first_failure(step.undone):
            logger.error("%s", answer.failure.message)
        elif group.rank == group.size - 1 or _runs_one_rank(worker):
            raise raisable(answer.failure)

    return call


def _wake(worker: Any, wake_up: Callable[..., None], tags: list[str]) -> None:
    """Run the worker's own part of a wake-up after the release of these tags was rolled back."""
    try:
        wake_up(worker, tags)
    except Exception as error:
        logger.warning("the worker's part of a sleep could not be undone: %s", error)


def _answer(
    worker: Any, operation: str, step: Step, changed: set[str], allocator: MemsaverAllocator
) -> Answer:
    lost = _lost(operation, step.undone, allocator)
    what, then = f"the {_WORDS[operation]}", _state_after(operation, step, lost)
    return next_answer(
        worker,
        operation,
        sorted(changed),
        set(allocator.released).intersection(RELEASE_ORDER),
        step.failed or step.reports,
        failure_of(step.failed, what, then),
        lost=lost,
    )


_WORDS = {"release": "sleep", "resume": "wake-up"}


def _state_after(operation: str, step: Step, lost: set[str]) -> str:
    then = "on every rank the memory is released as before; free memory and wake it again"
    trouble = first_failure(step.undone)
    if trouble is not None and trouble.failure is not None:
        rest = f"rank {trouble.rank} ({trouble.host}): {trouble.failure.message}"
        if operation == "release":
            return f"the engine counts as asleep, because memory could not be mapped again: {rest}"
        then = f"some ranks could not release their memory again: {rest}; wake the engine again"
    if operation == "resume":
        if lost:
            names = ", ".join(sorted(lost))
            then += f", and then load {names}: its contents are lost on some ranks"
        return then
    if not lost:
        return "every rank has its memory, with its contents"
    return f"every rank has its memory; contents of {', '.join(sorted(lost))} are lost"


def _lost(operation: str, undone: list[RankReport], allocator: MemsaverAllocator) -> set[str]:
    """Return the tags whose contents a failed call lost on at least one rank.

    A release loses the contents that it does not keep, and a resume loses the contents that it does
    not restore. If a rank cannot release such memory again, the memory stays mapped on this rank
    without its contents.
    """
    if operation == "resume" and first_failure(undone):
        return set(allocator.rewritten)
    moved = {tag for rank in undone for tag, nbytes in rank.device_bytes.items() if nbytes}
    if operation == "resume":
        return moved.intersection(allocator.rewritten)
    return {tag for tag in moved.intersection(RELEASE_ORDER) if allocator.discards(tag)}


def _runs_one_rank(worker: Any) -> bool:
    return worker.parallel_config.distributed_executor_backend in _OF_ONE_RANK
