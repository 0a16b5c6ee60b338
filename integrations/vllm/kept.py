"""State of LoRA adapters and draft models that a sleep at level 2 keeps.

vLLM 0.33 creates LoRA's stacks of adapters in the pool `runtime`, whose contents every sleep keeps,
and saves the buffers of a draft model like those of the model. Older versions create the stacks in
the pool of the weights, and save neither. After a wake-up from level 2, the adapters would be
zeros, although their manager counts them as loaded, and the engine would generate with the base
model. The wrappers in this module add the behaviour of 0.33 to versions that lack it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..engine import hooking
from ..engine.tags import WEIGHTS
from .allocator import RUNTIME, MemsaverAllocator

__all__ = ["LORA", "install_lora", "restores_draft", "saves_draft"]

LORA = "vllm.v1.worker.lora_model_runner_mixin"
_OWN = "_sleep_saved_draft_buffers"  # vLLM's attribute of a worker, if it saves these buffers
_SAVED = "_sleep_memsaver_draft_buffers"  # memsaver's; `wake_order` handles both
AllocatorOf = Callable[[], MemsaverAllocator | None]


def install_lora(module: ModuleType, allocator_of: AllocatorOf) -> None:
    """Create LoRA's stacks in the pool `runtime`, unless vLLM does so itself. Idempotent.

    Raises:
        AttributeError: the module does not have the expected class and method.
    """
    owner: Any = module.LoRAModelRunnerMixin
    if hasattr(module, "get_mem_allocator_instance"):
        return

    def load(original: Callable[..., Any], runner: Any, *arguments: Any, **named: Any) -> Any:
        allocator = allocator_of()
        if allocator is None:
            return original(runner, *arguments, **named)
        with allocator.use_memory_pool(RUNTIME):
            return original(runner, *arguments, **named)

    hooking.around(owner, "load_lora_model", load)


def saves_draft(sleep: Callable[..., None], allocator_of: AllocatorOf) -> Callable[..., None]:
    """Return a worker's sleep that saves the draft model's buffers at level 2."""

    @functools.wraps(sleep)
    def call(worker: Any, level: int = 1) -> None:
        draft = _draft(worker) if level == 2 and allocator_of() is not None else None
        if draft is not None:
            saved = {name: buffer.cpu().clone() for name, buffer in draft.named_buffers()}
            setattr(worker, _SAVED, saved)
        sleep(worker, level)

    return call


def restores_draft(wake_up: Callable[..., None]) -> Callable[..., None]:
    """Return a worker's wake-up that restores the draft's saved buffers with the weights."""

    @functools.wraps(wake_up)
    def call(worker: Any, tags: list[str] | None = None) -> None:
        wake_up(worker, tags)
        saved = getattr(worker, _SAVED, {})
        draft = _draft(worker) if saved and (tags is None or WEIGHTS in tags) else None
        if draft is None:
            return
        for name, buffer in draft.named_buffers():
            if name in saved:
                buffer.data.copy_(saved[name])
        setattr(worker, _SAVED, {})

    return call


def _draft(worker: Any) -> Any:
    """Return the worker's draft model; None if vLLM saves its buffers, or there is none."""
    if hasattr(worker, _OWN) or not hasattr(worker, "get_draft_model"):
        return None
    return worker.get_draft_model()
