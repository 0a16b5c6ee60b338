"""Hooks on optimizers and modules that refuse to work on memory that is not there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from memsaver.errors import ConfigError, InvalidStateError
from memsaver.handles import state
from memsaver.native import State

__all__ = ["Guard", "check_mapped", "guard_module", "guard_optimizer", "guard_parts"]

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
    """A hook for a module, which asks `check` before that one goes on.

    A shallow copy of a module has the same memory and the same hooks. Other copies have their hooks
    copied, and memory of their own: what a copy or a pickle of this is does nothing.
    """

    def __init__(self, check: Check, what: str) -> None:
        self._check = check
        self._what = what

    def __call__(self, owner: Any, *arguments: Any) -> None:
        """Called by torch, with what it calls hooks of this kind with."""
        import torch

        # In compiled code it would break the graph, which may have to be whole; the hooks of what
        # `torch.compile` returns run outside.
        if not torch.compiler.is_compiling():
            self._check(self._what)

    def __reduce__(self) -> tuple[type[_NoGuard], tuple[()]]:
        return _NoGuard, ()


class _NoGuard:
    def __call__(self, *arguments: Any) -> None:
        pass


def guard_optimizer(
    optimizer: Any, check: Check, stepped: Told, loaded: Told
) -> contextlib.ExitStack:
    """Ask `check` before each step and `load_state_dict`, and tell of each afterwards.

    A compiled step is broken into graphs around the hooks. Copies of an optimizer have no hooks.

    Returns:
        What takes the hooks away again when it is closed.

    Raises:
        ConfigError: it takes no hooks; it has none then.
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

    with _registering(optimizer) as hooks:
        for register, hook in (
            (optimizer.register_step_pre_hook, ask("the optimizer's step")),
            (optimizer.register_step_post_hook, tell(stepped)),
            (optimizer.register_load_state_dict_pre_hook, ask("the optimizer's load_state_dict")),
            (optimizer.register_load_state_dict_post_hook, tell(loaded)),
        ):
            hooks.callback(register(hook).remove)
        return hooks.pop_all()


def guard_module(module: Any, check: Check) -> contextlib.ExitStack:
    """Ask `check` before each forward and `load_state_dict` of a module. Its parts: `guard_parts`.

    Returns:
        What takes the hooks away again when it is closed.

    Raises:
        ConfigError: the module takes no hooks; it has none then.
    """
    with _registering(module) as hooks:
        _guard(module, check, hooks)
        return hooks.pop_all()


def guard_parts(module: Any, check: Check) -> contextlib.ExitStack:
    """As `guard_module`, for the modules inside of one.

    Parts that take no hooks, scripted ones, are guarded by those around them alone. Each hook costs
    some microseconds a forward, and torch has fast paths for modules without: not for long.
    """
    import torch

    with _registering(module) as hooks:
        for part in module.modules():
            if part is not module and not isinstance(part, torch.jit.ScriptModule):
                _guard(part, check, hooks)
        return hooks.pop_all()


def _guard(module: Any, check: Check, hooks: contextlib.ExitStack) -> None:
    forward = Guard(check, "the model's forward")
    loading = Guard(check, "the model's load_state_dict")
    # Before those of FSDP2, which gather parameters.
    hooks.callback(module.register_forward_pre_hook(forward, prepend=True).remove)
    hooks.callback(module.register_load_state_dict_pre_hook(loading).remove)


@contextlib.contextmanager
def _registering(target: Any) -> Iterator[contextlib.ExitStack]:
    """A stack of hooks that go when registering one fails: torch's errors are of many kinds."""
    with contextlib.ExitStack() as hooks:
        try:
            yield hooks
        except Exception as error:
            raise ConfigError(
                f"offload guards what it works on by torch's hooks, and a {type(target).__name__} "
                f"takes no hooks: {error}"
            ) from error
