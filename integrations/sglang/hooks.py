"""Where memsaver's hooks are in SGLang, and how they get there."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from memsaver.integrations.sglang import scheduler, tokenizer, weight_loads
from memsaver.integrations.sglang.updaters import of_scheduler

__all__ = ["install", "install_in", "left_out_by", "modules"]

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_MIXIN = "sglang.srt.managers.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_TOKENIZER = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
_RUNNER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_INSTALLED = "_memsaver_hooks"  # of a class


def install() -> None:
    """Put the hooks in place at once, importing the modules that they are on. Idempotent.

    To be called before the scheduler is made, when SGLang's modules can be imported.
    """
    for name in modules():
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            continue  # this SGLang has no such module
        install_in(module)


def modules() -> tuple[str, ...]:
    """The modules of SGLang's that have something to hook, for `install_in`.

    No SGLang has all of them: the handlers have moved.
    """
    targets = (*_hooks(), *_hooks_of_updates())
    return tuple(dict.fromkeys(target.rsplit(".", 2)[0] for target in targets))


def left_out_by(name: str) -> tuple[str, ...]:
    """Those of `modules()` that this SGLang has not, if they are not there when `name` is.

    The scheduler imports whatever has its handlers.
    """
    if name != _SCHEDULER.rpartition(".")[0]:
        return ()
    return tuple(handlers.rpartition(".")[0] for handlers in (_UPDATER, _MIXIN))


def install_in(module: ModuleType) -> None:
    """Put the hooks on one of `modules()` in place, which has been imported. Idempotent.

    Not by SGLang's registry: some processes do not ask it, and it imports whatever has a hook, the
    whole scheduler in a process that only detokenizes, say.
    """
    updates = _hooks_of_updates()
    for target, (kind, hook) in (_hooks() | updates).items():
        where, owner_name, name = target.rsplit(".", 2)
        if where != module.__name__:
            continue
        if target in updates and not hasattr(getattr(module, owner_name, None), name):
            continue
        owner = getattr(module, owner_name)
        done = vars(owner).get(_INSTALLED, frozenset())
        if name not in done:
            setattr(owner, name, _wrapped(kind, getattr(owner, name), hook))
            setattr(owner, _INSTALLED, done | {name})


def _hooks() -> dict[str, tuple[str, Callable[..., Any]]]:
    """By method: which kind of hook, in the words of SGLang's registry, and the hook.

    AROUND is called with the original and its arguments, AFTER with its result and its arguments,
    REPLACE with its arguments.
    """
    return {
        f"{_UPDATER}.release_memory_occupation": ("AROUND", scheduler.release),
        f"{_UPDATER}.resume_memory_occupation": ("AROUND", scheduler.resume),
        f"{_MIXIN}.release_memory_occupation": ("AROUND", of_scheduler(scheduler.release)),
        f"{_MIXIN}.resume_memory_occupation": ("AROUND", of_scheduler(scheduler.resume)),
        f"{_SCHEDULER}.get_internal_state": ("AFTER", scheduler.add_state),
        f"{_TOKENIZER}.release_memory_occupation": ("REPLACE", tokenizer.ask_to_release),
        f"{_TOKENIZER}.resume_memory_occupation": ("REPLACE", tokenizer.ask_to_resume),
    }


def _hooks_of_updates() -> dict[str, tuple[str, Callable[..., Any]]]:
    """Of weight updates, likewise. A version may lack some of the methods."""
    return {
        f"{_UPDATER}.update_weights_from_tensor": ("AROUND", weight_loads.load_tensors),
        f"{_UPDATER}.update_weights_from_distributed": ("AROUND", weight_loads.load_broadcast),
        f"{_RUNNER}.update_weights_from_tensor": ("AROUND", weight_loads.load_given),
        # 0.5.16 receives and loads in one, 0.5.23 in two.
        f"{_RUNNER}.update_weights_from_distributed": ("AROUND", weight_loads.load_through),
        f"{_RUNNER}.load_weights_from_distributed": ("AROUND", weight_loads.load_through),
    }


def _wrapped(kind: str, original: Callable[..., Any], hook: Callable[..., Any]) -> Any:
    """The method with its hook, which has by position what the caller gives by SGLang's names."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*given: Any, **named: Any) -> Any:
        bound = signature.bind(*given, **named)
        args, kwargs = bound.args, bound.kwargs
        if kind == "AROUND":
            return hook(original, *args, **kwargs)
        if kind == "AFTER":
            return hook(original(*args, **kwargs), *args, **kwargs)
        return hook(*args, **kwargs)

    return call
