"""Install memsaver's hooks for requests in methods of vLLM.

The hooks in vLLM's workers are in `worker`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..engine import hooking
from . import admissions, blocking_admissions, dead_calls, guard, settings

__all__ = ["install_in", "modules", "targets"]

_CORE = "vllm.v1.engine.core"
_CLIENT = "vllm.v1.engine.core_client"
_ASYNC = "vllm.v1.engine.async_llm.AsyncLLM"
_ENGINE = "vllm.v1.engine.llm_engine.LLMEngine"
_CHECKSUMS = "compute_weight_checksums"
_OUTPUTS = "vllm.v1.engine.output_processor.OutputProcessor"

_HOOKS: dict[str, tuple[str, Callable[..., Any]]] = {
    f"{_CORE}.EngineCore.__init__": ("AROUND", settings.fix_policy),
    f"{_CORE}.EngineCore.sleep": ("AROUND", guard.sleep),
    f"{_CORE}.EngineCore.wake_up": ("AFTER", guard.woken),
    f"{_CORE}.EngineCoreProc._handle_client_request": ("AROUND", guard.handle),
    f"{_CORE}.EngineCoreProc._notify_idle_state_callbacks": ("AROUND", guard.before_wait),
    f"{_CLIENT}.BackgroundResources.validate_alive": ("AROUND", dead_calls.validate_alive),
    f"{_CLIENT}.MPClient.shutdown": ("AFTER", dead_calls.shut_down),
    f"{_CLIENT}.SyncMPClient.call_utility": ("AROUND", dead_calls.call_utility),
    f"{_OUTPUTS}.process_outputs": ("AROUND", admissions.process_outputs),
    f"{_ASYNC}.abort": ("AROUND", admissions.abort),
    f"{_ASYNC}.encode": ("AROUND", admissions.encode),
    f"{_ASYNC}.generate": ("AROUND", admissions.generate),
    f"{_ENGINE}.add_request": ("AROUND", blocking_admissions.add_request),
}
_OPTIONAL: dict[str, tuple[str, Callable[..., Any]]] = {  # in newer versions
    f"{_ASYNC}.{_CHECKSUMS}": ("AROUND", admissions.control.utility(_CHECKSUMS)),
}
for _engine, _control in ((_ASYNC, admissions.control), (_ENGINE, blocking_admissions.control)):
    _HOOKS |= {
        f"{_engine}.__init__": ("AROUND", settings.fix_policy),
        f"{_engine}.add_lora": ("AROUND", _control.utility("add_lora")),
        f"{_engine}.collective_rpc": ("AROUND", _control.collective_rpc),
        f"{_engine}.pin_lora": ("AROUND", _control.utility("pin_lora")),
        f"{_engine}.sleep": ("AROUND", _control.sleep),
        f"{_engine}.wake_up": ("AROUND", _control.wake_up),
    }
    _OPTIONAL[f"{_engine}.release_kv_cache_memory"] = ("AROUND", _control.release_kv_cache)


def modules() -> tuple[str, ...]:
    """Return the names of vLLM's modules with methods to hook, for `install_in`."""
    return hooking.modules_of(_HOOKS, _OPTIONAL)


def targets() -> tuple[str, ...]:
    """Return the methods that exist in every supported version, as "module.Class.method"."""
    return tuple(_HOOKS)


def install_in(module: ModuleType) -> None:
    """Install the hooks in one of `modules()` after its import. Idempotent.

    Raises:
        AttributeError: the module does not have the expected interface.
    """
    hooking.install(module, _HOOKS, _OPTIONAL)
    if module.__name__ == _CORE:
        module.EngineCore.memsaver_memory = guard.memsaver_memory
