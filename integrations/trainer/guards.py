"""Hooks on optimizers and modules that refuse to work on memory that is not there."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from memsaver.errors import InvalidStateError
from memsaver.handles import state
from memsaver.native import State

__all__ = ["Guard", "check_mapped", "guard_module", "guard_optimizer"]

Check: TypeAlias = Callable[[str], object]  # of what is about to happen; raises if it must not
Told: TypeAlias = Callable[[Any], object]  # of the optimizer


def check_mapped(tag: str, what: str) -> None:
    """Raise InvalidStateError, which says what to do, unless the tag has its memory."""
    now = state(tag)
    if now is State.MAPPED:
        return
    if now is State.PAUSED:
        advice = f"memsaver.resume({tag!r}) first"
    else:
        advice = "wait for the transition that is under way"
    raise InvalidStateError(
        f"{what} needs the memory of tag {tag!r}, which is {now}: {advice}; nothing has been "
        "touched",
        tag=tag,
    )


class Guard:
    """A hook for one module, which asks `check` before that one goes on.

    Copies of the module have their hooks copied, and memory of their own: what a copy or a pickle
    of this is does nothing.
    """

    def __init__(self, owner: Any, check: Check, what: str) -> None:
        self._owner = weakref.ref(owner)
        self._check = check
        self._what = what

    def __call__(self, owner: Any, *arguments: Any) -> None:
        """Called by torch, with what it calls hooks of this kind with."""
        import torch

        # In compiled code it would break the graph, which may have to be whole; the hooks of what
        # `torch.compile` returns run outside.
        if not torch.compiler.is_compiling() and self._owner() is owner:
            self._check(self._what)

    def __reduce__(self) -> tuple[type[_NoGuard], tuple[()]]:
        return _NoGuard, ()


class _NoGuard:
    def __call__(self, *arguments: Any) -> None:
        pass


def guard_optimizer(
    optimizer: Any, check: Check, stepped: Told, loaded: Told
) -> list[Callable[[], None]]:
    """Ask `check` before each step and `load_state_dict`, and tell of each afterwards.

    A compiled step is broken into graphs around the hooks. Copies of an optimizer have no hooks.

    Returns:
        What takes the hooks away again.
    """
    import torch

    def ask(what: str) -> Callable[..., None]:
        def hook(owner: Any, *arguments: Any) -> None:
            check(what)

        return torch.compiler.disable(hook)  # type: ignore[no-any-return]

    def tell(told: Told) -> Callable[..., None]:
        def hook(owner: Any, *arguments: Any) -> None:
            told(owner)

        return torch.compiler.disable(hook)  # type: ignore[no-any-return]

    hooks = [
        optimizer.register_step_pre_hook(ask("the optimizer's step")),
        optimizer.register_step_post_hook(tell(stepped)),
        optimizer.register_load_state_dict_pre_hook(ask("the optimizer's load_state_dict")),
        optimizer.register_load_state_dict_post_hook(tell(loaded)),
    ]
    return [hook.remove for hook in hooks]


def guard_module(module: Any, check: Check) -> list[Callable[[], None]]:
    """Ask `check` before each forward and `load_state_dict` of the module.

    Returns:
        What takes the hooks away again.
    """
    hooks = [
        # Before those of FSDP2, which gather parameters.
        module.register_forward_pre_hook(Guard(module, check, "the model's forward"), prepend=True),
        module.register_load_state_dict_pre_hook(
            Guard(module, check, "the model's load_state_dict")
        ),
    ]
    return [hook.remove for hook in hooks]
