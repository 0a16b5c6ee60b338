"""Hooks in vLLM's `LLMEngine`, which `LLM` uses, for requests to a sleeping engine.

The policy is the same as that of an `AsyncLLM`; see `admissions`. The calling thread waits. While
it waits for a wake-up by another thread or process, it queries the engine once per second.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection
from typing import Any

from memsaver.errors import MemsaverError

from ..engine import blocking
from ..engine.admission import Admission
from ..engine.errors import EngineAsleepError, EngineError
from ..engine.refusals import asleep_in, refused
from .admissions import has_learned, learn_change, learned, made, tags_for_wake
from .calls import CHANGES, MODEL, Need, check_level, need_of
from .cores import error_from, memory_of

__all__ = [
    "add_lora",
    "add_request",
    "collective_rpc",
    "pin_lora",
    "release_kv_cache",
    "sleep",
    "wake_up",
]

_TOUCHED = "_memsaver_touched"  # of an engine: the time of the last query
_logger = logging.getLogger("memsaver.vllm")


def admission_of(engine: Any) -> Admission | None:
    """Return an `LLMEngine`'s `Admission`; None if memsaver does not manage its memory."""
    return made(engine, _Core)


class _Core:
    """See `Sleeper`. The calls block the event loop, which runs nothing else."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def released(self) -> frozenset[str] | None:
        setattr(self._engine, _TOUCHED, time.monotonic())
        return learned(self._engine, memory_of(self._engine.engine_core, touch=True))

    async def resume(self, tags: Collection[str]) -> frozenset[str]:
        engine = self._engine
        admission = admission_of(engine)
        before = admission.released if admission is not None else frozenset(tags)
        _logger.info("a request wakes the engine: resuming %s", ", ".join(tags))
        try:
            _checked(engine, lambda: engine.engine_core.wake_up(tags_for_wake(tags, before)))
        except MemsaverError:
            raise
        except Exception as error:
            raise EngineError(str(error)) from error
        if engine.logger_manager is not None:
            engine.logger_manager.record_sleep_state(0, 0)
        return before.difference(tags)


def add_request(original: Callable[..., Any], engine: Any, *args: Any, **named: Any) -> Any:
    """Wrap `LLMEngine.add_request`."""
    params = args[2]
    what = "compute embeddings" if type(params).__name__ == "PoolingParams" else "generate"
    _admit(engine, Need(MODEL, what))
    return original(engine, *args, **named)


def add_lora(original: Callable[..., Any], engine: Any, *args: Any, **named: Any) -> Any:
    """Wrap `LLMEngine.add_lora`."""
    return _call(engine, need_of("add_lora"), lambda: original(engine, *args, **named))


def pin_lora(original: Callable[..., Any], engine: Any, *args: Any, **named: Any) -> Any:
    """Wrap `LLMEngine.pin_lora`."""
    return _call(engine, need_of("pin_lora"), lambda: original(engine, *args, **named))


def collective_rpc(
    original: Callable[..., Any], engine: Any, method: Any, *args: Any, **named: Any
) -> Any:
    """Wrap `LLMEngine.collective_rpc`, which weight updates use as well."""
    work = functools.partial(original, engine, method, *args, **named)
    if method in CHANGES:
        return _changed(engine, work)
    return _call(engine, need_of(method), work)


def _call(engine: Any, need: Need | None, send: Callable[[], Any]) -> Any:
    if need is None:
        return send()
    _admit(engine, need)
    try:
        return send()
    except Exception as error:
        refusal = asleep_in(str(error))
        if refusal is None:
            raise
        raise refused(refusal) from error


def _admit(engine: Any, need: Need) -> None:
    """Return when the memory that a request needs is mapped; see `Admission.admit`."""
    admission = admission_of(engine)
    if admission is None or not _may_be_asleep(engine, admission):
        return

    async def work() -> None:
        if admission.policy.sleep_after:
            # The engine core may have released memory by itself; after the query it does not,
            # until the same time has passed again.
            await admission.refresh()
        await admission.admit(need.tags, need.what, reads=need.reads)

    try:
        blocking.run(work)
    except EngineAsleepError as error:
        raise refused(error) from error.__cause__


def _may_be_asleep(engine: Any, admission: Admission) -> bool:
    after = admission.policy.sleep_after
    touched = getattr(engine, _TOUCHED, -after)
    return bool(admission.released) or bool(after and time.monotonic() > touched + after / 2)


# --- sleep and wake-up ----------------------------------------------------------------------------


def sleep(original: Callable[..., Any], engine: Any, level: int = 1, mode: str = "abort") -> Any:
    """Wrap `LLMEngine.sleep`.

    Raises:
        ConfigError: vLLM has no such level.
    """
    check_level(level)
    return _changed(engine, lambda: original(engine, level, mode), level=level)


def wake_up(original: Callable[..., Any], engine: Any, tags: list[str] | None = None) -> Any:
    """Wrap `LLMEngine.wake_up`."""
    return _changed(engine, lambda: original(engine, tags), woken=tags)


def release_kv_cache(original: Callable[..., Any], engine: Any) -> Any:
    """Wrap `LLMEngine.release_kv_cache_memory`."""
    return _changed(engine, lambda: original(engine))


def _changed(engine: Any, work: Callable[[], Any], **change: Any) -> Any:
    admission = admission_of(engine)
    if admission is None:
        return work()
    try:
        result = _checked(engine, work)
    except Exception:
        blocking.run(admission.refresh)
        raise
    if not learn_change(engine, admission, **change):
        blocking.run(admission.refresh)
        has_learned(engine)
    return result


def _checked(engine: Any, work: Callable[[], Any]) -> Any:
    """Return the result of a sleep or a wake-up, or raise its typed error."""
    try:
        return work()
    except Exception as error:
        found = error_from(error, memory_of(engine.engine_core, failed=True))
        if found is error:
            raise
        raise found from error
