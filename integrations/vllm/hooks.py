"""The methods of vLLM that memsaver hooks for requests, and the installation of the hooks.

The hooks in vLLM's workers are in `worker`.
"""

from __future__ import annotations

from types import ModuleType

from ..engine import hooking
from . import admissions, blocking_admissions, dead_calls, guard

__all__ = ["install_in", "modules", "targets"]

_CORE = "vllm.v1.engine.core"
_CLIENT = "vllm.v1.engine.core_client"
_ASYNC = "vllm.v1.engine.async_llm.AsyncLLM"
_ENGINE = "vllm.v1.engine.llm_engine.LLMEngine"
_OUTPUTS = "vllm.v1.engine.output_processor.OutputProcessor"

_HOOKS: hooking.Hooks = {
    f"{_CORE}.EngineCore.sleep": ("AROUND", guard.sleep),
    f"{_CORE}.EngineCore.wake_up": ("AFTER", guard.woken),
    f"{_CORE}.EngineCoreProc._handle_client_request": ("AROUND", guard.handle),
    f"{_CORE}.EngineCoreProc._notify_idle_state_callbacks": ("AROUND", guard.before_wait),
    f"{_CLIENT}.MPClient.shutdown": ("AFTER", dead_calls.shut_down),
    f"{_OUTPUTS}.process_outputs": ("AROUND", admissions.process_outputs),
    f"{_ASYNC}.abort": ("AROUND", admissions.abort),
    f"{_ASYNC}.add_lora": ("AROUND", admissions.add_lora),
    f"{_ASYNC}.collective_rpc": ("AROUND", admissions.collective_rpc),
    f"{_ASYNC}.encode": ("AROUND", admissions.encode),
    f"{_ASYNC}.generate": ("AROUND", admissions.generate),
    f"{_ASYNC}.pin_lora": ("AROUND", admissions.pin_lora),
    f"{_ASYNC}.sleep": ("AROUND", admissions.sleep),
    f"{_ASYNC}.wake_up": ("AROUND", admissions.wake_up),
    f"{_ENGINE}.add_lora": ("AROUND", blocking_admissions.add_lora),
    f"{_ENGINE}.add_request": ("AROUND", blocking_admissions.add_request),
    f"{_ENGINE}.collective_rpc": ("AROUND", blocking_admissions.collective_rpc),
    f"{_ENGINE}.pin_lora": ("AROUND", blocking_admissions.pin_lora),
    f"{_ENGINE}.sleep": ("AROUND", blocking_admissions.sleep),
    f"{_ENGINE}.wake_up": ("AROUND", blocking_admissions.wake_up),
}
_OPTIONAL: hooking.Hooks = {  # since 0.27
    f"{_ASYNC}.release_kv_cache_memory": ("AROUND", admissions.release_kv_cache),
    f"{_ENGINE}.release_kv_cache_memory": ("AROUND", blocking_admissions.release_kv_cache),
}


def modules() -> tuple[str, ...]:
    """Return vLLM's modules with methods to hook, for `install_in`."""
    return hooking.modules_of(_HOOKS, _OPTIONAL)


def targets() -> tuple[str, ...]:
    """Return the methods that every supported version has, as "module.Class.method"."""
    return tuple(_HOOKS)


def install_in(module: ModuleType) -> None:
    """Install the hooks in one of `modules()`, which has been imported. Idempotent.

    Raises:
        AttributeError: the module does not have the expected interface.
    """
    hooking.install(module, _HOOKS, _OPTIONAL)
    if module.__name__ == _CORE:
        module.EngineCore.memsaver_memory = guard.memsaver_memory
