"""Record releases and wake-ups by workers' methods that a client calls through collective_rpc.

vLLM's executor records the tags that its own `sleep`, `wake_up` and `discard` release or map. The
guard and later wake-ups rely on this record. The workers have methods with the same names. If a
client calls these methods directly, vLLM does not update the record: the next request would use
released memory, and a wake-up would ignore this memory. This module updates the record after each
such call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from memsaver.errors import ConfigError, MemsaverError

from ..engine.errors import EngineBusyError
from ..engine.messages import Failure
from ..engine.tags import KV_CACHE, WEIGHTS
from .calls import MODEL, check_level
from .guard import Guard, guard_of
from .protocol import RANK_STATE

__all__ = ["check_idle", "is_idle", "run", "set_asleep"]


def run(
    core: Any,
    method: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    call: Callable[[Sequence[Any], Mapping[str, Any]], Any],
) -> Any:
    """Run a call to a method in `calls.DIRECT`, and record which tags are released after the call.

    memsaver's own errors are also recorded: an engine core in its own process sends only an error's
    text to its client, which then queries the error.

    Args:
        core: the engine core.
        method: the name of the workers' method.
        args: the method's arguments.
        kwargs: the method's keyword arguments.
        call: a function that calls the method with the given arguments.

    Raises:
        ConfigError: the sleep's level is neither 1 nor 2, or the tags to discard include a tag
            other than the weights and the KV cache.
        EngineBusyError: requests are in flight (see `check_idle`), or blocks of the KV cache to
            discard are still in use, for example for a transfer.
    """
    guard = guard_of(core)
    if not guard.is_ours:
        return call(args, kwargs)
    with _recorded(guard):
        if method == "wake_up":
            result = call(*_with_list(args, kwargs))
            _record(core)
            guard.woken()
            return result
        if method == "discard":
            level, (args, kwargs) = 2, _with_list(args, kwargs)
            tags = _argument(args, kwargs, "tags")
            _check_discarded(tags)
            discards_cache = KV_CACHE in (tags or ())
        else:
            discards_cache = True
            level = _argument(args, kwargs, "level", 1)
            _check_level(level)
            if WEIGHTS in guard.released:  # at level 2, vLLM's worker reads their buffers
                args, kwargs = _replaced(args, kwargs, "level", 1)
        check_idle(core, queued=False)  # a step that is still queued runs before this call
        results = []

        def release() -> None:
            is_reset = core.reset_prefix_cache()
            if not is_reset and discards_cache and KV_CACHE not in guard.released:
                raise EngineBusyError(
                    "blocks of the KV cache are still in use, so it cannot be released: try again "
                    "later"
                )
            results.append(call(args, kwargs))
            _record(core)

        guard.sleep(release, level)
        return results[0]


@contextlib.contextmanager
def _recorded(guard: Guard) -> Iterator[None]:
    """Record the error if the block raises one of memsaver's own errors."""
    guard.refusal = None
    try:
        yield
    except MemsaverError as error:
        guard.refusal = asdict(Failure.of(error))
        raise


def _argument(
    args: Sequence[Any], kwargs: Mapping[str, Any], name: str, default: Any = None
) -> Any:
    """Return a method's first argument."""
    return args[0] if args else kwargs.get(name, default)


def _replaced(
    args: Sequence[Any], kwargs: Mapping[str, Any], name: str, value: Any
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return a method's arguments with another value for the first argument."""
    return ((value, *args[1:]), kwargs) if args else (args, {**kwargs, name: value})


def _with_list(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return a method's arguments; if its tags are a string, replace the string with a list."""
    tags = _argument(args, kwargs, "tags")
    return _replaced(args, kwargs, "tags", [tags]) if isinstance(tags, str) else (args, kwargs)


def _check_level(level: object) -> None:
    check_level(level)
    if level == 0:
        raise ConfigError(
            "level 0 only stops the scheduling, but vLLM's workers would discard all memory: call "
            "the engine's own sleep(level=0)"
        )


def _check_discarded(tags: Sequence[str] | None) -> None:
    others = [tag for tag in tags or () if tag not in MODEL]
    if others:
        raise ConfigError(
            f"{', '.join(others)} cannot be discarded by the workers' method, because the engine "
            f"would use this memory in the next request: discard only {' or '.join(sorted(MODEL))}"
        )


def _record(core: Any) -> None:
    states = core.model_executor.collective_rpc(RANK_STATE)
    released = {tag for state in states for tag in state["released"]}
    set_asleep(core.model_executor, MODEL & released)


def set_asleep(executor: Any, tags: Collection[str]) -> None:
    """Record these tags, and no others, as asleep in vLLM's executor."""
    executor.sleeping_tags = set(tags)
    if not isinstance(getattr(type(executor), "is_sleeping", None), property):  # vLLM 0.26
        executor.is_sleeping = bool(tags)


def is_idle(core: Any) -> bool:
    """Return True if no request uses memory or is about to use memory.

    Requests that a pause holds are ignored.
    """
    return not getattr(core, "batch_queue", None) and not _has_requests(core)


def check_idle(core: Any, *, queued: bool = True) -> None:
    """Raise `EngineBusyError` if a request uses memory or is about to use memory; see `is_idle`.

    Args:
        core: the engine core.
        queued: whether to consider steps that are still queued; they may belong to ended requests.
    """
    if _has_requests(core) or (queued and getattr(core, "batch_queue", None)):
        raise EngineBusyError(
            "the engine has requests in flight, and memory that they use cannot be released"
        )


def _has_requests(core: Any) -> bool:
    """Return whether requests run or are about to run. Requests held by a pause are ignored."""
    if core.scheduler.running:
        return True
    return bool(not core.is_scheduler_paused() and core.scheduler.has_unfinished_requests())
