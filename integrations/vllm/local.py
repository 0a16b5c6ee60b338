"""The arguments, the death and the errors of an engine of this process."""

from __future__ import annotations

import concurrent.futures
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from memsaver.errors import ConfigError, MemsaverError

from ..engine.errors import EngineDiedError, EngineError

__all__ = ["MARK", "arguments_of", "death_of", "has_plugin", "result_of"]

Result = TypeVar("Result")

_CORE = "vllm.v1.engine.core"
MARK = "_memsaver_calls"  # of the engine core's class, if `core_calls` answers its calls


def has_plugin() -> bool:
    """Return whether engines that this process starts have memsaver's plugin.

    Their processes load the same plugins.
    """
    core = getattr(sys.modules.get(_CORE), "EngineCore", None)
    return hasattr(core, MARK)


def arguments_of(config: Any, weight_version: str | None = None) -> dict[str, Any]:
    """Return the description of an engine with this `VllmConfig`, in JSON's types."""
    from vllm import __version__ as version

    ranks, model = config.parallel_config, config.model_config
    return {
        "tp_size": int(ranks.tensor_parallel_size),
        "pp_size": int(ranks.pipeline_parallel_size),
        "dp_size": int(ranks.data_parallel_size),
        "skip_tokenizer_init": bool(model.skip_tokenizer_init),
        "enable_sleep_mode": bool(model.enable_sleep_mode),
        "version": version,
        "weight_version": weight_version,
    }


def death_of(client: Any) -> str:
    """Describe the end of the processes of an engine core's client; "" if none is known."""
    resources = getattr(client, "resources", None)
    if resources is None:
        return ""
    for process in getattr(getattr(resources, "engine_manager", None), "processes", ()):
        alive = getattr(process, "is_alive", None)
        if callable(alive) and not alive():
            return f"its process {process.pid} ended with status {process.exitcode}"
    return "its engine core ended" if getattr(resources, "engine_dead", False) else ""


def result_of(
    done: concurrent.futures.Future[Result], what: str, death: Callable[[], str]
) -> Result:
    """Return the result of a call that has ended, with vLLM's errors as memsaver's.

    Raises:
        EngineDiedError: the call raised, and one of the engine's processes ended.
        EngineError: the call raised.
        ConfigError: vLLM rejects the call's arguments. memsaver's own errors are raised unchanged.
    """
    try:
        return done.result()
    except MemsaverError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if (ended := death()) or type(error).__name__ == "EngineDeadError":
            raise EngineDiedError(f"the engine died during {what}: {ended or text}") from error
        if type(error).__name__ == "VLLMValidationError":
            raise ConfigError(f"the engine rejects {what}: {text}") from error
        raise EngineError(f"the engine failed during {what}: {text}") from error
