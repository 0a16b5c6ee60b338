"""`Local`, the class for calls to a vLLM engine in this process."""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable, Sequence
from typing import Any

from memsaver.errors import ConfigError, MemsaverError

from ..engine.errors import EngineDiedError
from ..engine.processes import death_among
from .link import Link

__all__ = ["ERRORS", "MARK", "Local", "arguments_of", "has_plugin", "sleep_mode_of"]

# memsaver's error for each of vLLM's errors.
ERRORS: dict[str, type[MemsaverError]] = {
    "EngineDeadError": EngineDiedError,
    "VLLMValidationError": ConfigError,
}

_CORE = "vllm.v1.engine.core"
MARK = "_memsaver_calls"  # an attribute of an engine core class whose calls `core_calls` answers


def has_plugin() -> bool:
    """Return whether engines that this process starts have memsaver's plugin.

    The engines' processes load the same plugins as this process.
    """
    core = getattr(sys.modules.get(_CORE), "EngineCore", None)
    return hasattr(core, MARK)


def arguments_of(config: Any, weight_version: str | None = None) -> dict[str, Any]:
    """Return the description of an engine with this `VllmConfig`, as JSON values."""
    from vllm import __version__ as version

    ranks, model = config.parallel_config, config.model_config
    return {
        "tp_size": int(ranks.tensor_parallel_size),
        "pp_size": int(ranks.pipeline_parallel_size),
        "dp_size": int(ranks.data_parallel_size),
        "skip_tokenizer_init": bool(model.skip_tokenizer_init),
        "enable_sleep_mode": sleep_mode_of(config),
        "version": version,
        "weight_version": weight_version,
    }


def sleep_mode_of(config: Any) -> bool:
    """Return whether an engine with this `VllmConfig` can sleep.

    If only `enable_cumem_allocator` is set, which `enable_sleep_mode` implies, vLLM also allocates
    memory that can be released.
    """
    model = config.model_config
    return bool(model.enable_sleep_mode or getattr(model, "enable_cumem_allocator", False))


class Local(Link):
    """A vLLM engine in this process."""

    _engine: Any  # the `AsyncLLM`, or the `LLMEngine` of a `vllm.LLM`

    @abc.abstractmethod
    def run(self, what: str, work: Callable[[], Any], timeout: float) -> Any:
        """Make a call to the engine, and return its result.

        Args:
            what: a description of the call, for error messages.
            work: the function that makes the call; for an `AsyncLLM`, a coroutine.
            timeout: the time in seconds after which the call is cancelled.

        Raises:
            ConfigError: the timeout is not a positive number, or vLLM rejects the arguments.
            EngineTimeoutError: the call did not return in time.
            EngineDiedError: one of the engine's processes exited.
            EngineError: the call raised an exception. memsaver's own errors are raised unchanged.
            InvalidStateError: the calling thread is running an event loop.
        """

    def has_plugin(self, timeout: float) -> bool:
        """See `Link`."""
        return has_plugin()

    def rpc(self, method: str, arguments: Sequence[Any], timeout: float) -> list[Any]:
        """See `Link`."""
        call = self._engine.collective_rpc
        return list(self.run(method, lambda: call(method, timeout, tuple(arguments)), timeout))

    def has_sleep_mode(self, timeout: float) -> bool:
        """See `Link`."""
        return sleep_mode_of(self._engine.vllm_config)

    def plain_arguments(self, timeout: float) -> dict[str, Any]:
        """See `Link`."""
        return arguments_of(self._engine.vllm_config)

    def death(self) -> str:
        """See `Backend`."""
        resources = getattr(self._engine.engine_core, "resources", None)
        processes = getattr(getattr(resources, "engine_manager", None), "processes", ())
        ended = death_among(one for one in processes if hasattr(one, "is_alive"))
        is_dead = getattr(resources, "engine_dead", False)
        return ended or ("its engine core exited" if is_dead else "")

    def unfinished(self) -> list[str]:
        """Return the ids of the requests in flight."""
        processor = self._engine.output_processor
        return [*processor.request_states, *getattr(processor, "parent_requests", ())]
