"""The SGLang methods that memsaver hooks, and the installation of the hooks."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..engine import hooking
from . import (
    admissions,
    draft_weights,
    guard,
    hybrid_pools,
    idle_sleep,
    pipeline,
    replicas,
    scheduler,
    settings,
    tokenizer,
    unguarded,
    unknown_requests,
    weight_loads,
    weight_reads,
)
from .updaters import of_scheduler

__all__ = ["NO_PLACE", "install", "install_in", "lacks_guard", "left_out_by", "modules"]

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_MIXIN = "sglang.srt.managers.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_GUARDED = f"{_SCHEDULER}.init_request_dispatcher"  # the method whose hook installs the guard
NO_PLACE = "Scheduler.init_request_dispatcher was not found"
_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_ADMITTED = f"{_MANAGER}.generate_request"  # the method whose hook applies the policy
_TOKENIZER = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
_COMMUNICATOR = "sglang.srt.managers.communicator.FanOutCommunicator"
_RUNNER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner"
_HYBRID = "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool"


def _after(first: Callable[..., Any], second: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that runs the hook `first` around the hook `second`."""

    def hook(original: Callable[..., Any], *args: Any) -> Any:
        return first(functools.partial(second, original), *args)

    return hook


_UPDATE = admissions.call("update its weights", reads=False)
_LOAD_ADAPTER = admissions.call("load a LoRA adapter")
_CONTROL_CALLS: dict[str, Callable[..., Any]] = {
    f"{_TOKENIZER}.begin_weight_update": _UPDATE,
    f"{_TOKENIZER}.end_weight_update": _UPDATE,
    f"{_TOKENIZER}.update_weights_from_distributed": _after(
        _UPDATE, replicas.update("update_weights_from_distributed")
    ),
    f"{_TOKENIZER}.update_weights_from_ipc": _UPDATE,
    f"{_TOKENIZER}.update_weights_from_tensor": _after(
        _UPDATE, replicas.update("update_weights_from_tensor")
    ),
    f"{_TOKENIZER}.init_weights_update_group": replicas.join("init_weights_update_group"),
    f"{_TOKENIZER}.destroy_weights_update_group": replicas.join("destroy_weights_update_group"),
    f"{_MANAGER}.update_weights_from_disk": _UPDATE,
    f"{_TOKENIZER}.load_lora_adapter": _LOAD_ADAPTER,
    f"{_TOKENIZER}.load_lora_adapter_from_tensors": _LOAD_ADAPTER,
    f"{_TOKENIZER}.check_weights": admissions.call("read its weights"),
    f"{_TOKENIZER}.get_weights_by_name": weight_reads.by_name,
    f"{_TOKENIZER}.send_weights_to_remote_instance": admissions.call("send its weights"),
}
_missing: set[str] = set()  # methods that imported modules lack
_logger = logging.getLogger("memsaver.sglang")


def install() -> None:
    """Import the modules to hook, and install all hooks. Idempotent.

    Call this function before the scheduler is created, once SGLang's modules can be imported.
    """
    for name in modules():
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            continue  # this version of SGLang has no such module
        install_in(module)


def modules() -> tuple[str, ...]:
    """Return the names of SGLang's modules with methods to hook, for `install_in`.

    No version of SGLang contains all of these modules, because the handlers have moved.
    """
    return hooking.modules_of(_hooks(), _optional_hooks())


def left_out_by(name: str) -> tuple[str, ...]:
    """Return the modules that SGLang lacks if importing its module `name` did not import them.

    The scheduler imports the module with its handlers.
    """
    if name != _SCHEDULER.rpartition(".")[0]:
        return ()
    return tuple(handlers.rpartition(".")[0] for handlers in (_UPDATER, _MIXIN))


def lacks_guard() -> bool:
    """Return whether this version of SGLang lacks the method whose hook installs the guard."""
    return _GUARDED in _missing


def _sleep_when_idle(result: Any, scheduler: Any) -> Any:
    """Make an idle engine release memory, unless it cannot refuse requests; see `idle_sleep`."""
    return result if unguarded.has_failed(scheduler) else idle_sleep.install(result, scheduler)


def install_in(module: ModuleType) -> None:
    """Install the hooks in an imported module of `modules()`. Idempotent.

    Does not use SGLang's registry, because some processes do not apply it. The registry also
    imports each module with a hook, for example the whole scheduler in a process that only
    detokenizes.
    """
    try:
        missing = set(hooking.install(module, _hooks(), _optional_hooks()))
        if _ADMITTED in missing - _missing:
            _logger.error(
                "SGLang's TokenizerManager has no generate_request, so memsaver can neither hold "
                "requests to a sleeping engine nor wake it: they are refused, as with "
                "MEMSAVER_SGLANG_ASLEEP=refuse"
            )
        _missing.update(missing)
    except Exception as error:
        _mark_unguarded(module, f"{type(error).__name__}: {error}")
        raise
    _mark_unguarded(module, NO_PLACE)


def _mark_unguarded(module: ModuleType, reason: str) -> None:
    """Mark the schedulers of a module in which the guard's hook was not installed."""
    where, kind, name = _GUARDED.rsplit(".", 2)
    owner = getattr(module, kind, None)
    if module.__name__ != where or owner is None:
        return
    if name not in vars(owner).get(hooking.INSTALLED, ()):
        setattr(owner, unguarded.FAILED, reason)


def _hooks() -> dict[str, tuple[str, Callable[..., Any]]]:
    """Return the hook for each method, with its kind as in SGLang's registry; see `hooking`."""
    return {
        f"{_UPDATER}.release_memory_occupation": ("AROUND", scheduler.release),
        f"{_UPDATER}.resume_memory_occupation": ("AROUND", scheduler.resume),
        f"{_MIXIN}.release_memory_occupation": ("AROUND", of_scheduler(scheduler.release)),
        f"{_MIXIN}.resume_memory_occupation": ("AROUND", of_scheduler(scheduler.resume)),
        f"{_SCHEDULER}.get_internal_state": ("AFTER", scheduler.add_state),
        f"{_TOKENIZER}.release_memory_occupation": ("REPLACE", tokenizer.request_release),
        f"{_TOKENIZER}.resume_memory_occupation": ("REPLACE", tokenizer.request_resume),
    }


def _optional_hooks() -> dict[str, tuple[str, Callable[..., Any]]]:
    """Return the hooks for methods that some versions of SGLang lack."""
    return {
        **_hooks_of_requests(),
        **_hooks_of_updates(),
        f"{_MODEL}.load_model": ("AROUND", draft_weights.load),
        f"{_HYBRID}.__init__": ("AROUND", hybrid_pools.build),
    }


def _hooks_of_requests() -> dict[str, tuple[str, Callable[..., Any]]]:
    """Return the hooks that protect a sleeping engine from requests."""
    return {
        _GUARDED: ("AFTER", guard.install),
        f"{_SCHEDULER}.flush_cache": ("AROUND", guard.flush),
        f"{_SCHEDULER}._dispatch_tokenized_mm_requests": ("AROUND", guard.dispatch_unread),
        f"{_SCHEDULER}.process_input_requests": ("AFTER", pipeline.after_input),
        f"{_SCHEDULER}._pp_send_pyobj_to_next_stage": ("AFTER", pipeline.after_send),
        f"{_SCHEDULER}.init_watch_dog_memory_saver_input_blocker": ("AFTER", _sleep_when_idle),
        f"{_MANAGER}.__init__": ("AROUND", settings.fix_policy),
        _ADMITTED: ("AROUND", admissions.generate),
        f"{_MANAGER}.abort_request": ("AROUND", admissions.abort),
        f"{_MANAGER}._handle_abort_finish_reason": ("AROUND", admissions.abort_reason),
        f"{_MANAGER}._discard_pending_req_states": ("AROUND", admissions.discard_pending),
        f"{_MANAGER}._release_req_states_on_failure": ("AROUND", admissions.release_states),
        f"{_TOKENIZER}.init_communicators": ("AFTER", unknown_requests.attach),
        f"{_COMMUNICATOR}.__call__": ("AROUND", unknown_requests.call),
        f"{_COMMUNICATOR}.handle_recv": ("AROUND", unknown_requests.receive),
        **{target: ("AROUND", hook) for target, hook in _CONTROL_CALLS.items()},
    }


def _hooks_of_updates() -> dict[str, tuple[str, Callable[..., Any]]]:
    """Return the hooks for weight updates."""
    disk = weight_loads.plain_load("UpdateWeightFromDiskReqOutput", has_barrier=False)
    ipc = weight_loads.plain_load("UpdateWeightsFromIPCReqOutput", has_barrier=True)
    tensors = weight_loads.plain_load("UpdateWeightsFromTensorReqOutput", has_barrier=True)
    broadcast = weight_loads.plain_load("UpdateWeightsFromDistributedReqOutput", has_barrier=False)
    begin, end = (
        weight_loads.everywhere(kind, weight_loads.plain(kind, has_barrier=True, ends_session=True))
        for kind in ("BeginWeightUpdateReqOutput", "EndWeightUpdateReqOutput")
    )
    join, leave = (
        weight_loads.everywhere(f"{kind}WeightsUpdateGroupReqOutput")
        for kind in ("Init", "Destroy")
    )
    hooks: dict[str, Callable[..., Any]] = {
        f"{_UPDATER}.update_weights_from_disk": disk,
        f"{_UPDATER}.update_weights_from_ipc": ipc,
        f"{_UPDATER}.update_weights_from_tensor": weight_loads.load_tensors,
        f"{_UPDATER}.update_weights_from_distributed": weight_loads.load_broadcast,
        f"{_UPDATER}.init_weights_update_group": join,
        f"{_UPDATER}.destroy_weights_update_group": leave,
        f"{_UPDATER}.begin_weight_update": begin,
        f"{_UPDATER}.end_weight_update": end,
        f"{_MIXIN}.update_weights_from_disk": of_scheduler(disk),
        f"{_MIXIN}.update_weights_from_ipc": of_scheduler(ipc),
        f"{_MIXIN}.update_weights_from_tensor": of_scheduler(tensors),
        f"{_MIXIN}.update_weights_from_distributed": of_scheduler(broadcast),
        f"{_MIXIN}.init_weights_update_group": of_scheduler(join),
        f"{_MIXIN}.destroy_weights_update_group": of_scheduler(leave),
        f"{_RUNNER}.update_weights_from_ipc": weight_loads.load_through,
        f"{_RUNNER}.update_weights_from_tensor": weight_loads.load_given,
        # 0.5.16 receives and loads in one method, 0.5.23 in two.
        f"{_RUNNER}.update_weights_from_distributed": weight_loads.load_through,
        f"{_RUNNER}.load_weights_from_distributed": weight_loads.load_through,
    }
    return {target: ("AROUND", hook) for target, hook in hooks.items()}
