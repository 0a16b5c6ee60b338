"""Hooks in vLLM's `LLMEngine`, which `LLM` uses, for requests to a sleeping engine.

The policy is the same as that of an `AsyncLLM`; see `admissions`. The calling thread waits. While a
thread waits for a wake-up by another thread or process, it queries the engine once per second.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from memsaver._runtime.native import _C
from memsaver.errors import OutOfDeviceMemoryError

from ..engine import blocking
from ..engine.errors import EngineAsleepError, EngineError
from ..engine.refusals import asleep_in, refused
from . import unsent_inputs
from .admissions import (
    Cores,
    VllmAdmission,
    assumed_asleep_if_interrupted,
    get_admission,
    record_change,
    record_memory,
)
from .calls import MODEL, Need
from .control_hooks import ControlHooks
from .cores import error_from, memory_of

__all__ = ["add_request", "control"]

_TOUCHED = "_memsaver_touched"  # an attribute of an engine: the time of the last query


def admission_of(engine: Any) -> VllmAdmission | None:
    """Return an `LLMEngine`'s `Admission`; None if memsaver does not manage its memory."""
    return get_admission(engine, _Core)


class _Core(Cores):
    """See `engine.admission.Sleeper`. The calls block the event loop, which has no other tasks."""

    async def released(self) -> frozenset[str] | None:
        setattr(self._engine, _TOUCHED, time.monotonic())
        return record_memory(self._engine, memory_of(self._engine.engine_core, touch=True))

    async def _wake(self, tags: list[str] | None) -> None:
        engine = self._engine
        try:
            _checked(engine, lambda: engine.engine_core.wake_up(tags))
        except OutOfDeviceMemoryError as error:
            ranks = engine.vllm_config.parallel_config
            if ranks.distributed_executor_backend != "external_launcher" or ranks.world_size == 1:
                raise
            # Each rank has its own engine, and a wake-up waits for all of them. No rank may repeat
            # the wake-up, because the ranks' deadlines differ.
            raise EngineError(str(error)) from error


def add_request(original: Callable[..., Any], engine: Any, *args: Any, **named: Any) -> Any:
    """Wrap `LLMEngine.add_request`."""
    params = args[2]
    what = "compute embeddings" if type(params).__name__ == "PoolingParams" else "generate"
    try:
        _admit(engine, Need(MODEL, what))
    except BaseException:
        unsent_inputs.forget(engine, args[1], lambda: engine.renderer.clear_mm_cache())
        raise
    return original(engine, *args, **named)


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
    """Wait until the memory that a request needs is mapped; see `Admission.admit`."""
    admission = admission_of(engine)
    if admission is None or not _may_be_asleep(engine, admission):
        return

    async def work() -> None:
        if admission.policy.sleep_after:
            # The engine core may have released memory on its own. After the query, it does not do
            # so again until its idle time has passed.
            await admission.refresh()
        await admission.admit(need.tags, need.what, reads=need.reads)

    try:
        blocking.run(work)
    except EngineAsleepError as error:
        raise refused(error) from error.__cause__


def _may_be_asleep(engine: Any, admission: VllmAdmission) -> bool:
    after = admission.policy.sleep_after
    touched = getattr(engine, _TOUCHED, -after)
    return bool(admission.released) or bool(after and time.monotonic() > touched + after / 2)


def _changed(engine: Any, work: Callable[[], Any], **change: Any) -> Any:
    admission = admission_of(engine)
    if admission is None:
        return work()

    def whole() -> Any:
        with assumed_asleep_if_interrupted(admission):
            try:
                result = _checked(engine, work)
            except Exception:
                with contextlib.suppress(Exception):  # the engine may have ended
                    blocking.run(admission.refresh)
                raise
            if not record_change(admission, **change):
                blocking.run(admission.refresh)
            return result

    if not hasattr(engine.engine_core, "engine_core"):
        return whole()
    # The engine core runs in this process. Its executor records a sleep only after releasing the
    # memory. If a signal handler raised an exception in between, the executor would ignore the next
    # wake-up, and a weight update would use released memory.
    return _C.uninterrupted(whole, True)


def _checked(engine: Any, work: Callable[[], Any]) -> Any:
    """Return the result of a sleep or a wake-up, or raise an error of the original type."""
    try:
        return work()
    except Exception as error:
        found = error
        with contextlib.suppress(Exception):  # an engine does not answer if a worker has exited
            found = error_from(error, memory_of(engine.engine_core, failed=True))
        if found is error:
            raise
        raise found from error


control = ControlHooks(_changed, _call)
